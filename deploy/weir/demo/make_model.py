"""Makes the demo's model by a warm start (supervised training), once; later runs take it from the cache.

python -m weir.demo.make_model --out DIRECTORY [--seed N]
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from weir.demo.student import write_plan
from weir.errors import StackError


def model_for(
    cache: Path,
    seed: int,
    on_progress: Callable[[str], None] = print,
    game: str = "tool",
    write: Callable[[Path], None] = write_plan,
) -> tuple[Path, bool]:
    """The directory of the model of this seed and this game's plan, and whether this call made it.

    `write` writes the plan: the files that the warm start reads. Raises StackError when the warm start fails,
    for instance because the model does not reach the plan's accuracy.
    """
    with tempfile.TemporaryDirectory() as scratch:
        plan = Path(scratch) / "plan"
        write(plan)
        out = cache / f"{game}-{_digest(plan)}-seed{seed}"
        if (out / "config.json").exists():
            return out, False
        make_model(plan, out, seed, on_progress)
    return out, True


def make_model(plan: Path, out: Path, seed: int, on_progress: Callable[[str], None]) -> None:
    """Warm-start a new model on a plan. Raises StackError with the last lines of its output."""
    command = [sys.executable, "-m", "trainer_service.warm_start"]
    command += ["--plan", str(plan), "--out", str(out), "--seed", str(seed)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    output: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            for line in process.stdout or ():
                output.append(line.rstrip())
                on_progress(output[-1])
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        raise StackError(f"the warm start failed: {' / '.join(output[-3:]) or 'it printed nothing'}")


def _digest(plan: Path) -> str:
    """A digest of the plan's content, so that a changed plan never gets an old model."""
    whole = hashlib.sha256()
    for path in sorted(plan.iterdir()):
        whole.update(path.name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(prog="weir.demo.make_model", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if (arguments.out / "config.json").exists():
        sys.stdout.write(json.dumps({"model": str(arguments.out), "made": False}) + "\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        plan = Path(scratch) / "plan"
        write_plan(plan)
        try:
            make_model(plan, arguments.out, arguments.seed, lambda line: print(line, flush=True))
        except StackError as error:
            raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
