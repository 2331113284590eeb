"""The batch script for Slurm repeats the trainer until it ends well, and gives its place back in time.

`srun` and `scontrol` are stand-ins here; the variables that srun sets are tested with the trainer's ranks.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S, wait_until

SCRIPT = Path(__file__).parents[3] / "deploy" / "slurm" / "trainer.sbatch"
SRUN = """#!/bin/bash
echo "$*" >>calls
status=$(sed -n "$(wc -l <calls)p" statuses)
if [ "$status" = runs ]; then
    trap 'echo stopped >>calls; exit 0' TERM
    touch runs
    while :; do read -r -t 1 <>"$PIPE" || true; done
fi
exit "$status"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a srun that ends with the statuses in a file, one after the other."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "scontrol $*" >>calls\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@contextmanager
def batch(folder: Path, *statuses: str) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "statuses").write_text("\n".join(statuses) + "\n")
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PIPE": str(folder / "pipe"),
        "WEIR_CONFIG": "/shared/weir.yaml",
        "WEIR_PYTHON": "python",
        "WEIR_RETRY_S": "0",
        "SLURM_JOB_ID": "17",
    }
    with subprocess.Popen(
        ["bash", str(SCRIPT)], cwd=folder, env=variables, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text(encoding="utf-8").splitlines()


TRAINER = "--kill-on-bad-exit=1 python -m trainer_service --config /shared/weir.yaml"


def test_a_trainer_that_fails_starts_again_and_one_that_ends_well_does_not(folder: Path) -> None:
    with batch(folder, "1", "137", "0") as process:
        assert process.wait(PATIENCE_S) == 0
    assert calls(folder) == [TRAINER] * 3


@pytest.mark.parametrize(
    ("statuses", "number", "then"),
    [
        pytest.param(["runs"], signal.SIGUSR1, ["scontrol requeue 17"], id="its time is nearly over"),
        pytest.param(["1", "runs"], signal.SIGTERM, [], id="it is cancelled"),
    ],
)
def test_a_job_that_ends_stops_its_trainer_and_goes_back_into_the_queue_unless_it_is_cancelled(
    folder: Path, statuses: list[str], number: signal.Signals, then: list[str]
) -> None:
    with batch(folder, *statuses) as process:
        wait_until((folder / "runs").exists)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
    assert calls(folder) == [*[TRAINER] * len(statuses), "stopped", *then]


def test_the_settings_of_the_job_fit_each_other() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    given = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.M))
    assert given["ntasks-per-node"] == given["gpus-per-node"]
    assert given["signal"] == "B:USR1@300"
    assert "requeue" in given


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is missing")
def test_shellcheck_has_no_complaint() -> None:
    subprocess.run(["shellcheck", str(SCRIPT)], check=True)
