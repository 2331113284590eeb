"""One rank that measures how much memory models take while they load:

torchrun --nproc-per-node N -m tests.support.trainer_service.loading_peaks OUT MODEL...

Each rank loads every model at stage 3 of ZeRO as a policy, its critic and its reference, and makes two passes
of the reference. It writes to OUT/RANK.json how much anonymous memory each of these took at most, above the
level before it. Pages of a mapped file are not anonymous: the kernel can drop them. The figures of the first
model contain what Python and torch allocate only once.
"""

import gc
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch

from tests.support.trainer_service.random_rows import random_rows
from trainer_service.model.deepspeed_policy import DeepSpeedPolicy
from trainer_service.rows.rows import micro_batches
from trainer_service.settings import TrainerSettings
from trainer_service.step.rank_communication import own_rank

LOOKS_EVERY_S = 0.001
Peaks = dict[str, dict[str, float]]
"""In bytes, by model and by what took them: `policy`, `critic` and `reference` load, `passes` follow."""


def anonymous_bytes() -> int:
    """The memory of this process that belongs to no file."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class PeakMeter:
    """The highest anonymous memory since `begin`, above the level then."""

    def __init__(self) -> None:
        self._level = self._peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(LOOKS_EVERY_S):
            self._peak = max(self._peak, anonymous_bytes())

    def begin(self) -> None:
        gc.collect()
        self._level = self._peak = anonymous_bytes()

    def end(self) -> float:
        return max(self._peak, anonymous_bytes()) - self._level

    def __enter__(self) -> "PeakMeter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def loads_measured(meter: PeakMeter, peaks: list[float]) -> Iterator[None]:
    """Inside the context, adds what was taken before each call of `deepspeed.initialize`, and begins anew
    after it: DeepSpeed's own copies for training are no part of loading."""
    initialize = deepspeed.initialize

    def measured(**given: Any) -> Any:
        peaks.append(meter.end())
        made = initialize(**given)
        meter.begin()
        return made

    deepspeed.initialize = measured
    try:
        yield
    finally:
        deepspeed.initialize = initialize


def peaks_of(model: Path, meter: PeakMeter) -> dict[str, float]:
    settings = TrainerSettings(
        model_path=model,
        zero_stage=3,
        device="cpu",
        threads=1,
        critic={},
        algorithm={"advantage": "gae", "kl": {"coefficient": 0.1}},
    )
    (batch,) = micro_batches(random_rows(1, 1), 1000)
    loads: list[float] = []
    meter.begin()
    with loads_measured(meter, loads):
        policy = DeepSpeedPolicy(settings)
        meter.begin()
        for _ in range(2):
            policy.reference(batch)
    return dict(zip(("policy", "critic", "reference"), loads, strict=False)) | {"passes": meter.end()}


def main(out: Path, models: list[Path]) -> None:
    with PeakMeter() as meter:
        peaks = {model.name: peaks_of(model, meter) for model in models}
    (out / f"{own_rank()}.json").write_text(json.dumps(peaks), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
