"""Two real ranks learn what one learns, and end when one of them does."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.support.trainer_service.random_rows import POISON, MakePupil, random_rows
from tests.support.trainer_service.same_training import (
    WELL_CONDITIONED,
    Weights,
    assert_moved_alike,
    differs_by,
    same_metrics,
)
from trainer_service.rows.rows import Row
from trainer_service.settings import TrainerSettings
from trainer_service.step.step_request import StepRequest
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import RunState
from weir.stack.services import launcher as launcher_of

Steps = Sequence[Sequence[Row]]

pytestmark = pytest.mark.timeout(400)  # processes that start one after another, perhaps on a busy machine


TORCH = (sys.executable, *launcher_of(2), "-m")
"""As `weir up` starts them."""
DEEPSPEED = (str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2", "--module")


@contextmanager
def two_ranks(folder: Path, launched_by: Sequence[str] = TORCH) -> Iterator[subprocess.Popen[bytes]]:
    command = [*launched_by, "tests.support.trainer_service.two_ranks", str(folder)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join([".", "queue"]),
    }
    with subprocess.Popen(command, env=environment, start_new_session=True) as launcher:
        try:
            yield launcher
        finally:
            if launcher.poll() is None:
                for worker in psutil.Process(launcher.pid).children(recursive=True):
                    worker.kill()
            launcher.kill()


def give(
    folder: Path, settings: TrainerSettings, steps: Steps, probes: Steps = (), in_parts: bool = False
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "task.pickle").write_bytes(pickle.dumps((settings, steps, probes, in_parts)))
    return folder


def learned(
    folder: Path, launched_by: Sequence[str] = TORCH
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], list[bool]]:
    """The weights in the end, what each step told, and which probes were sound."""
    with two_ranks(folder, launched_by) as launcher:
        assert launcher.wait(300) == 0
    told, sound, finite = pickle.loads((folder / "told.pickle").read_bytes())  # noqa: S301
    assert finite
    return load_file(folder / "weights.safetensors"), told, sound


@pytest.mark.numeric
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_learn_in_parts_what_one_learns_at_once(
    make_pupil: MakePupil, untrained: Weights, tmp_path: Path, stage: int
) -> None:
    # The third step has one row, so that one rank is left without; the last has a gradient that is infinite.
    steps = [random_rows(1, 5), random_rows(2, 8), random_rows(3, 1), random_rows(4, 5, POISON)]
    probes = [random_rows(5, 3), random_rows(5, 3, POISON), random_rows(6, 1)]
    one = make_pupil(optimizer=WELL_CONDITIONED)
    of_one = [one.leader.optimise(StepRequest(each, 0, one.settings.algorithm)) for each in steps]
    settings = make_pupil(zero_stage=stage, optimizer=WELL_CONDITIONED).settings
    together, of_two, sound = learned(give(tmp_path / "two", settings, steps, probes, in_parts=True))
    assert_moved_alike(together, one.exported(), untrained)
    for told_alone, told in zip(of_one, of_two, strict=True):
        assert told == same_metrics(told_alone), "rank 0 tells of all rows"
    assert of_two[-1]["grad_norm"] == float("inf")
    assert sound == [True, False, True]


def test_the_launcher_of_deepspeed_starts_the_same_ranks(make_pupil: MakePupil, tmp_path: Path) -> None:
    settings, steps = make_pupil(optimizer=WELL_CONDITIONED).settings, [random_rows(1, 5)]
    by_torch, told, _ = learned(give(tmp_path / "torch", settings, steps))
    by_deepspeed, told_too, _ = learned(give(tmp_path / "deepspeed", settings, steps), DEEPSPEED)
    assert told_too == told
    assert differs_by(by_deepspeed, by_torch) == 0


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_goes_on_with_fewer_and_with_more_ranks(
    make_pupil: MakePupil, untrained: Weights, tmp_path: Path, stage: int
) -> None:
    one, other = (
        make_pupil(optimizer=WELL_CONDITIONED),
        make_pupil(zero_stage=stage, optimizer=WELL_CONDITIONED),
    )
    steps = [random_rows(seed, 6) for seed in range(3)]
    two, _, _ = learned(give(tmp_path / "run", other.settings, steps[:1]))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 2)
    checkpoints.restore(other.leader)
    assert differs_by(other.exported(), two) == 0
    other.leader.optimise(StepRequest(steps[1], 0, other.settings.algorithm))
    checkpoints.save(other.leader, RunState(step=2), [])
    two, _, _ = learned(give(tmp_path / "run", other.settings, steps))
    for each in steps:
        one.leader.optimise(StepRequest(each, 0, one.settings.algorithm))
    assert_moved_alike(one.exported(), two, untrained)


@pytest.mark.parametrize("stage", [1, 3])
def test_when_one_rank_dies_all_end_and_the_next_start_goes_on_bitwise(
    make_pupil: MakePupil, tmp_path: Path, stage: int
) -> None:
    settings = make_pupil(zero_stage=stage, optimizer=WELL_CONDITIONED).settings
    steps = [random_rows(seed, 8) for seed in range(2000)]
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    with two_ranks(give(killed, settings, steps)) as launcher:
        wait_for(lambda: saved_step(killed) >= 2)
        workers = psutil.Process(launcher.pid).children()
        (other,) = (worker for worker in workers if worker.environ()["RANK"] == "1")
        other.send_signal(signal.SIGKILL)
        assert launcher.wait(60) != 0
        assert not any(worker.is_running() and worker.status() != "zombie" for worker in workers)
    assert not (killed / "told.pickle").exists()
    enough = steps[: saved_step(killed) + 2]
    resumed, told, _ = learned(give(killed, settings, enough))
    assert len(told) == 2
    uninterrupted, all_told, _ = learned(give(straight, settings, enough))
    assert told == all_told[-2:]
    assert differs_by(resumed, uninterrupted) == 0


def test_a_rank_without_orders_takes_no_time(make_pupil: MakePupil, tmp_path: Path) -> None:
    """A rollout takes minutes, and a core that waits for it is one that the engine has not."""
    folder = give(tmp_path / "run", make_pupil().settings, [random_rows(1, 5)])
    (folder / "rest").touch()
    with two_ranks(folder) as launcher:
        wait_for((folder / "idle").exists)
        workers = psutil.Process(launcher.pid).children()
        (other,) = (worker for worker in workers if worker.environ()["RANK"] == "1")
        before = other.cpu_times()
        time.sleep(3)
        after = other.cpu_times()
        (folder / "rest").unlink()
        assert launcher.wait(60) == 0
    assert after.user + after.system - before.user - before.system < 0.5


def saved_step(folder: Path) -> int:
    current = folder / "checkpoints" / "CURRENT"
    return int(current.read_text().rpartition("-")[2]) if current.exists() else 0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
