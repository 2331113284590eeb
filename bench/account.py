"""What a step took of this process, told as one line of JSON. The standard library alone."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from bench.rollouts import Rollout, tokens

STATUS = Path("/proc/self/status")


def resident_mib(peak: bool = False) -> float:
    """Memory that this process has, or the most that it ever had."""
    name = "VmHWM:" if peak else "VmRSS:"
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    """The peak is counted from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def timed(step: Callable[[], float]) -> tuple[float, float]:
    """What a step gives back, and the CPU seconds of all threads that it took."""
    started = time.process_time()
    return step(), time.process_time() - started


def tell(**facts: float) -> None:
    print(json.dumps(facts), flush=True)


def tell_step(rollouts: list[Rollout], cpu_s: float, gradient_norm: float, **more: float) -> None:
    """Of one that trained on these rollouts."""
    peak_mib = resident_mib(peak=True)
    facts = {"rollouts": len(rollouts), "tokens": tokens(rollouts), "cpu_s": cpu_s, "peak_mib": peak_mib}
    tell(**facts, gradient_norm=gradient_norm, **more)
