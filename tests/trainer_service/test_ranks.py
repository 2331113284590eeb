"""Two real ranks learn what one learns, and end when one of them does."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer_service.conftest import VOCABULARY
from tests.trainer_service.rig import MakeRig
from trainer_service.batch import Row
from trainer_service.ranks import Leader
from trainer_service.settings import TrainerSettings
from weir.services import launcher as launcher_of


def rows(seed: int, count: int) -> list[Row]:
    """Rows of uneven lengths, so that ranks have uneven shares."""
    draw = np.random.default_rng(seed)
    made = []
    for index in range(count):
        length = int(draw.integers(6, 40))
        mask = np.array([0, 0, *[1] * (length - 2)])
        made.append(
            Row(
                session_id=f"s{index}",
                turn_ids=(f"t{index}",),
                advantage=float(draw.normal()),
                ids_L=draw.integers(2, VOCABULARY, length),
                mask_L=mask,
                logprobs_L=np.where(mask == 1, -4.0, 0.0).astype(np.float32),
                versions_L=np.where(mask == 1, 0, -1),
                temperatures_L=np.ones(length, np.float32),
            )
        )
    return made


@contextmanager
def two_ranks(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Under torch's launcher, as `weir up` starts them."""
    command = [sys.executable, *launcher_of(2)]
    command += ["-m", "tests.trainer_service.two_ranks", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([".", "queue"])}
    with subprocess.Popen(command, env=environment, start_new_session=True) as launcher:
        try:
            yield launcher
        finally:
            if launcher.poll() is None:
                for worker in psutil.Process(launcher.pid).children(recursive=True):
                    worker.kill()
            launcher.kill()


def learned(
    folder: Path, settings: TrainerSettings, steps: Sequence[Sequence[Row]]
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    folder.mkdir(exist_ok=True)
    (folder / "task.pickle").write_bytes(pickle.dumps((settings, steps)))
    with two_ranks(folder) as launcher:
        assert launcher.wait(120) == 0
    metrics: list[dict[str, Any]] = pickle.loads((folder / "metrics.pickle").read_bytes())  # noqa: S301
    return load_file(folder / "weights.safetensors"), metrics


@pytest.fixture
def settings(make_rig: MakeRig) -> TrainerSettings:
    return make_rig(algorithm={"max_tokens": 64}).settings


def test_two_ranks_learn_what_one_learns(
    tmp_path: Path, settings: TrainerSettings, make_rig: MakeRig
) -> None:
    # Five rows make five micro-batches or fewer; the last step has one, which only one rank can have.
    steps = [rows(1, 5), rows(2, 8), rows(3, 1)]
    one = Leader(make_rig().policy)
    of_one = [one.optimise(each, 0, settings.algorithm) for each in steps]
    one.export(tmp_path / "one.safetensors")
    alone = load_file(tmp_path / "one.safetensors")
    together, of_two = learned(tmp_path / "two", settings, steps)
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, atol=2e-6, rtol=0, msg=name)
    for told_alone, told in zip(of_one, of_two, strict=True):
        assert told == pytest.approx(told_alone, abs=1e-5), "rank 0 tells of all rows"
    resumed, _ = learned(tmp_path / "two", settings, [rows(4, 6)])
    straight, _ = learned(tmp_path / "straight", settings, [*steps, rows(4, 6)])
    for name, tensor in straight.items():
        assert torch.equal(resumed[name], tensor), f"{name} differs after a restart"


def test_when_one_rank_dies_all_end(tmp_path: Path, settings: TrainerSettings) -> None:
    (tmp_path / "task.pickle").write_bytes(pickle.dumps((settings, [rows(n, 8) for n in range(2000)])))
    with two_ranks(tmp_path) as launcher:
        deadline = time.monotonic() + 90
        workers: list[psutil.Process] = []
        while len(workers) < 2 or min(sum(w.cpu_times()[:2]) for w in workers) < 8:
            assert time.monotonic() < deadline
            time.sleep(0.2)
            workers = psutil.Process(launcher.pid).children()
        by_rank = {worker.environ()["RANK"]: worker for worker in workers}
        by_rank["1"].send_signal(signal.SIGKILL)
        assert launcher.wait(60) != 0
        assert not any(worker.is_running() and worker.status() != "zombie" for worker in workers)
    assert not (tmp_path / "checkpoints").exists()
