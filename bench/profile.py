"""Where a plain turn's CPU time goes, part by part, and the floor of the same server under the same load.

python -m bench.profile [--calls N] [--concurrency N]

A sample counts for the innermost frame that lies in a room of ours, or in the server. One that falls into C
counts for the Python that called it; of the event loop's own, for what it calls next.
"""

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

from bench.gateway import TURN_TOKENS, Rig, load, measured, rig
from bench.processes import answering, cpu_s, free_port, module, running
from tests.support.tiny_model import make_tiny_model

PARTS = {
    "uvicorn/": "uvicorn",
    "gateway/edge/": "edge",
    "gateway/sessions/": "session",
    "gateway/admission/": "session",
    "gateway/dialects/": "dialect",
    "gateway/language/": "prompt",
    "gateway/language/fast_parse": "recording",
    "gateway/conversations/": "prompt",
    "gateway/generations/": "prompt",
    "gateway/generations/generation": "recording",
    "gateway/generations/recorder": "recording",
    "gateway/engines/": "sampling",
    "gateway/metrics": "recording",
    "rollout_queue/": "recording",
    "rollout_queue/http/": "edge",
}
"""What a frame is part of, by the longest of these that its file has in it."""
LARGEST = 6
"""Functions that a part names."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=32)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stacks = folder / "stacks.json"
        with rig(make_tiny_model(folder / "model"), folder, sampled=stacks) as under:
            measured(under, asked.concurrency, 1000, TURN_TOKENS, "plain")  # warm
            taken(under, stacks)
            cpu_us = measured(under, asked.concurrency, asked.calls, TURN_TOKENS, "plain")["cpu_us"]
            seen = taken(under, stacks)
    print(table(seen, cpu_us))
    print(f"\nThe floor: {floor_us(asked.concurrency, asked.calls):.0f} µs.")


def taken(under: Rig, stacks: Path) -> dict[str, int]:
    """What the sampler saw since it was asked last."""
    os.kill(under.gateways[0][1], signal.SIGUSR1)
    while not stacks.exists():
        time.sleep(0.01)
    seen: dict[str, int] = json.loads(stacks.read_text(encoding="utf-8"))
    stacks.unlink()
    return seen


def table(seen: Mapping[str, int], cpu_us: float) -> str:
    """The samples as microseconds of a turn, largest part first."""
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
    """The part that a stack belongs to, and the function of it."""
    for frame in reversed(stack):
        file, _, function = frame.rpartition(":")
        if fitting := [fragment for fragment in PARTS if fragment in file]:
            return PARTS[max(fitting, key=len)], function
    return "the loop", "its own"


def floor_us(concurrency: int, calls: int) -> float:
    """CPU of a server that answers a constant, per call: the median of three loads."""
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
