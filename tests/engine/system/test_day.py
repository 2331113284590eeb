"""The day of one user, as README has it, on the real stack: an agent, an environment, a second task, what was
trained, and a stack with that model. No command stops, and none is silent."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.serving import free_port
from tests.support.system.real_system import PORTS
from tests.support.weir.notebooks import code_of

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = '''
class Letter:
    """The first letter of the answer is one of these."""

    right = "abcdefghijklm"

    def tasks(self, seed):
        return ({"number": number} for number in range(4))

    def reset(self, task):
        return "value of abcd"[: 9 + task["number"]] + "?"

    def step(self, answer):
        return None, float(answer[:1] in self.right and answer != ""), True, False, {}


class Other(Letter):
    """A second task."""

    right = "nopqrstuvwxyz"
'''


@dataclass
class Day:
    """A directory in which somebody works, with ports of its own."""

    place: Path
    variables: dict[str, str] = field(default_factory=dict)

    def weir(self, *words: str) -> str:
        """What the command says. It ends well, it says something, and no traceback."""
        done = subprocess.run(
            [sys.executable, "-m", "weir", *words],
            cwd=self.place,
            env=os.environ | self.variables,
            capture_output=True,
            text=True,
            timeout=900,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"weir {' '.join(words)}: {said[-3000:]}"
        assert done.stdout.strip()
        assert "Traceback" not in said
        return done.stdout

    def python(self, file: str, text: str) -> str:
        """What a program of theirs says; it speaks to the gateway of these ports."""
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{self.variables['WEIR_GATEWAY__PORT']}")
        (self.place / file).write_text(text, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, file],
            cwd=self.place,
            env=os.environ | self.variables,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout


@pytest.fixture
def day(tmp_path: Path) -> Iterator[Day]:
    ports = {name: str(free_port()) for name in PORTS}
    models = {"WEIR_STACK__MODELS_DIR": str(ROOT / "run" / "models")}
    engine = {"WEIR_STACK__ENGINE_PYTHON": str(ROOT / ".venv-engine" / "bin" / "python")}
    day = Day(tmp_path, ports | models | engine)
    yield day
    for run in ("run", "run2"):
        if (tmp_path / run / "stack.json").exists():
            with suppress(AssertionError):
                day.weir("down", "--run-dir", run)


def test_from_an_agent_to_a_model_of_ones_own(day: Day) -> None:
    began = day.weir("up")
    assert f"http://127.0.0.1:{day.variables['WEIR_GATEWAY__PORT']}/" in began, "the page"
    assert "run/policies" in began, "where the trained model will be"
    assert "weir " in began.splitlines()[-1] or "examples/" in began, "the next command"

    examples = ROOT / "examples"
    said = day.python("five_lines.py", (examples / "five_lines.py").read_text(encoding="utf-8"))
    assert "'code': " in said
    said = day.python("tool_agent.py", (examples / "tool_agent.py").read_text(encoding="utf-8"))
    assert "answers calls now" in said
    said = day.python("sessions.py", code_of(examples / "sessions.ipynb"))
    assert "'version': " in said
    said = day.python("training.py", code_of(examples / "training.ipynb"))
    assert re.search(r"80 groups, \d+ with different rewards, version", said)
    before, after = map(float, re.findall(r"^mean reward ([\d.]+)", said, re.M))
    assert after > before

    (day.place / "own.py").write_text(ENVIRONMENTS, encoding="utf-8")
    for name in ("Letter", "Other", "Letter"):  # and the first one again
        said = day.weir(
            "env", "run", f"python:own:{name}", "--set", "episodes=192", "--run-dir", f"runs/{name}"
        )
        assert "reward" in said
        shutil.rmtree(day.place / "runs" / name)
    assert "went back" not in day.weir("status")
    assert "every turn was trained once, waits, or has a final verdict" in day.weir("audit")

    assert "version" in day.weir("export-model", "mine")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(day.place / "mine")
    tokenizer = AutoTokenizer.from_pretrained(day.place / "mine")
    asked = tokenizer("value of c?", return_tensors="pt")
    assert model.generate(**asked, max_new_tokens=4).shape[1] > asked["input_ids"].shape[1]
    assert "stopped" in day.weir("down")

    day.variables |= {"WEIR_MODEL_PATH": "mine", "WEIR_STACK__RUN_DIR": "run2"}
    day.weir("up")
    said = day.python("five_lines.py", (examples / "five_lines.py").read_text(encoding="utf-8"))
    assert "'code': " in said
    assert "stopped" in day.weir("down")
