"""Measures which parts of the gateway use the CPU time of a plain turn, and the lower bound (`bench.floor`).

python -m bench.profile [--calls N] [--concurrency N]

A sample counts for its innermost frame in the code of Weir or of uvicorn. A sample in C code counts for the
Python function that called it, and a sample in the event loop for the function that the loop calls next."""

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from bench.gateway import TURN_TOKENS, Rig, load, measured, running_rig
from bench.processes import answering, cpu_s, free_port, module, running
from tests.support.tiny_model import make_tiny_model

PARTS = {
    "uvicorn/": "uvicorn",
    "gateway/edge/": "edge",
    "gateway/edge/reply": "replies",
    "gateway/sessions/": "sessions",
    "gateway/callers/": "sessions",
    "gateway/dialects/": "requests",
    "gateway/dialects/chat_wire": "replies",
    "gateway/language/": "prompts",
    "gateway/language/partial_parse": "recording",
    "gateway/generations/": "prompts",
    "gateway/generations/generation.py": "recording",
    "gateway/generations/recorder": "recording",
    "gateway/fleet/": "sampling",
    "gateway/counters": "recording",
    "rollout_queue/": "recording",
    "rollout_queue/http/": "edge",
}
"""The parts of the work, by strings in file paths. If a path has several, the longest one decides."""
LARGEST = 6
"""The number of functions that the table names for a part."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=32)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stacks = folder / "stacks.json"
        with running_rig(make_tiny_model(folder / "model"), folder, sampled=stacks) as rig:
            measured(rig, asked.concurrency, 1000, TURN_TOKENS, "plain")  # warm
            taken(rig, stacks)
            cpu_us = measured(rig, asked.concurrency, asked.calls, TURN_TOKENS, "plain")["cpu_us"]
            seen = taken(rig, stacks)
    print(table(seen, cpu_us))
    print(f"\nThe floor: {floor_us(asked.concurrency, asked.calls):.0f} µs.")


def taken(rig: Rig, stacks: Path) -> dict[str, int]:
    """The samples since the last call: counts by stack."""
    os.kill(rig.gateways[0][1], signal.SIGUSR1)
    while not stacks.exists():
        time.sleep(0.01)
    seen: dict[str, int] = json.loads(stacks.read_text(encoding="utf-8"))
    stacks.unlink()
    return seen


def table(seen: Mapping[str, int], cpu_us: float) -> str:
    """The samples as microseconds per turn, the largest part first."""
    places: Counter[tuple[str, str]] = Counter()
    for stack, count in seen.items():
        places[place_of(stack.split(";"))] += count
    parts: Counter[str] = Counter()
    for (part, _), count in places.items():
        parts[part] += count
    us = cpu_us / places.total()
    lines = [f"| part | µs, of {cpu_us:.0f} | most of it in |", "|---|---|---|"]
    for part, count in parts.most_common():
        inside = Counter({where: n for (whose, where), n in places.items() if whose == part})
        named = ", ".join(f"`{where}` {n * us:.0f}" for where, n in inside.most_common(LARGEST))
        lines.append(f"| {part} | {count * us:.0f} | {named} |")
    return "\n".join([*lines, f"\n{places.total()} samples."])


def place_of(stack: list[str]) -> tuple[str, str]:
    """The part that a stack belongs to, and its innermost function there."""
    for frame in reversed(stack):
        file, _, function = frame.rpartition(":")
        if fitting := [fragment for fragment in PARTS if fragment in file]:
            return PARTS[max(fitting, key=len)], function
    return "event loop", "(no function of Weir)"


def floor_us(concurrency: int, calls: int) -> float:
    """CPU microseconds per call of a server with a constant answer: the median of three loads."""
    port = free_port()
    with running(module("bench.floor", port)) as pid:
        answering(f"http://127.0.0.1:{port}/")
        spent = []
        for _ in range(3):
            before = cpu_s(pid)
            load(port, concurrency, calls, TURN_TOKENS, "plain")
            spent.append((cpu_s(pid) - before) / calls * 1e6)
    return statistics.median(spent)


if __name__ == "__main__":
    main()
