"""docs/tutorial.md as written, with the real model: files are made, commands run, and print what it shows."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.serving import free_port
from tests.support.system.real_system import PORTS

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "run" / "models" / "smollm2"
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.M | re.S)
NOT_RUN = {"pip install weir-rl openai"}
"""The tests' environment has both."""
SERVICES = (*PORTS, "WEIR_REWARDS__PORT")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(
        not (MODEL / "config.json").exists(), reason="no SmolLM2: `make test-engine` makes it"
    ),
]


@dataclass
class Reader:
    """Somebody who follows the page, in an empty directory."""

    place: Path
    variables: dict[str, str]
    said: str = ""
    """What the last commands printed."""

    def write(self, block: str) -> None:
        head, _, text = block.partition("\n")
        name, _, added = head.removeprefix("# ").partition(", ")
        with (self.place / name).open("a" if added else "x", encoding="utf-8") as file:
            file.write(text)

    def run(self, block: str) -> None:
        self.said = ""
        for command in block.splitlines():
            if command in NOT_RUN:
                continue
            if command.startswith("export "):
                name, _, value = command.removeprefix("export ").partition("=")
                self.variables[name] = value
            else:
                self.said += self._output(command)

    def _output(self, command: str) -> str:
        done = subprocess.run(
            command.split(),
            cwd=self.place,
            env=os.environ | self.variables,
            capture_output=True,
            text=True,
            timeout=1500,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"{command}: {said[-3000:]}"
        assert "Traceback" not in said
        return said

    def compare(self, block: str) -> None:
        """Each line that the page shows was printed, with other numbers and other answers."""
        lines = [" ".join(line.split()) for line in self.said.splitlines()]
        for line in block.splitlines():
            shown = re.escape(re.sub(r"(a tree|a flower): .*|…", "…", " ".join(line.split())))
            pattern = re.sub(r"\d+(\\\.\d+)*", r"[\\d.]+", shown).replace("…", ".*")
            assert any(re.fullmatch(pattern, each) for each in lines), f"{line!r} is not in {lines[-20:]}"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    variables = {name: str(free_port()) for name in SERVICES} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "WEIR_STACK__MODELS_DIR": str(MODEL.parent),
        "WEIR_STACK__ENGINE_PYTHON": str(ROOT / ".venv-engine" / "bin" / "python"),
    }
    reader = Reader(tmp_path, variables)
    yield reader
    if (tmp_path / "run" / "stack.json").exists():
        with suppress(AssertionError):
            reader.run("weir down")


def test_the_page_trains_a_real_model_as_it_is_written(reader: Reader) -> None:
    printed: dict[str, str] = {}
    for language, block in BLOCKS:
        if language in ("python", "yaml"):
            reader.write(block)
        elif language == "bash":
            reader.run(block)
            printed[block.strip()] = reader.said
            print(block, reader.said, sep="\n")
        else:
            reader.compare(block)
    before, after = map(float, re.findall(r"reward ([\d.]+) → ([\d.]+)", printed["python agent.py"])[0])
    assert after > 0.6 > before
    assert "version" in printed["python graded.py"]
    assert "a flower: " in printed["python load.py"]
