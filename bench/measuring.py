"""CPU time and memory of a step of this process, printed as JSON, with the standard library only."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from bench.rollouts import SyntheticRollout, tokens

STATUS = Path("/proc/self/status")


def resident_mib(peak: bool = False) -> float:
    """The resident memory of this process now, or its peak, in MiB."""
    name = "VmHWM:" if peak else "VmRSS:"
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def reset_peak() -> None:
    """Start a new measurement of the peak."""
    Path("/proc/self/clear_refs").write_text("5")


def timed(step: Callable[[], float]) -> tuple[float, float]:
    """The result of a step, and the CPU seconds of all threads that it took."""
    started = time.process_time()
    return step(), time.process_time() - started


def print_facts(**facts: float | str) -> None:
    """Print figures by name as one line of JSON."""
    print(json.dumps(facts), flush=True)


def print_step(rollouts: list[SyntheticRollout], cpu_s: float, gradient_norm: float, **more: float) -> None:
    """Print the figures of an optimizer step on these rollouts."""
    peak_mib = resident_mib(peak=True)
    facts = {"rollouts": len(rollouts), "tokens": tokens(rollouts), "cpu_s": cpu_s, "peak_mib": peak_mib}
    print_facts(**facts, gradient_norm=gradient_norm, **more)
