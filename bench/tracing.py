"""What traces, JSON logs and the access log cost: CPU per turn of gateways with and without them, in one run.

python -m bench.tracing [--calls N] [--repetitions N] [--concurrency N]

Each round puts the same load on each gateway in turn, so that a change of the machine's speed meets all of
them. The table has the median of the rounds' ratios to the gateway without anything.
"""

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.gateway import TURN_TOKENS, Rig, measured, running_rig
from tests.support.observe.otlp_receiver import otlp_receiver
from tests.support.tiny_model import make_tiny_model

OFF = "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="of each measurement")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--concurrency", type=int, default=32)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        collector = stack.enter_context(otlp_receiver())
        kinds = {
            OFF: {},
            "traces at the default ratio": {"WEIR_OTEL": json.dumps({"endpoint": collector.url})},
            "every call is traced": {
                "WEIR_OTEL": json.dumps({"endpoint": collector.url, "sample_ratio": 1, "queue_spans": 2**17})
            },
            "a dead collector, every call": {
                "WEIR_OTEL": json.dumps({"endpoint": "http://127.0.0.1:9", "sample_ratio": 1})
            },
            "JSON and access log": {"WEIR_LOG_FORMAT": "json", "WEIR_ACCESS_LOG": "true"},
        }
        model = make_tiny_model(Path(name) / "model")
        rigs: dict[str, Rig] = {}
        for number, (kind, settings) in enumerate(kinds.items()):
            folder = Path(name) / str(number)
            folder.mkdir()
            rigs[kind] = stack.enter_context(running_rig(model, folder, settings=settings))
            measured(rigs[kind], asked.concurrency, 500, TURN_TOKENS, "plain")  # warm
        rounds = [
            {kind: _cpu_us(rig, asked.concurrency, asked.calls) for kind, rig in rigs.items()}
            for _ in range(asked.repetitions)
        ]
        print(f"{len(collector.spans)} spans arrived")
    print("| | CPU µs/turn | ratio |\n|---|---|---|")
    for kind in kinds:
        cpu_us = statistics.median(each[kind] for each in rounds)
        ratio = statistics.median(each[kind] / each[OFF] for each in rounds)
        print(f"| {kind} | {cpu_us:.0f} | {ratio:.3f} |")


def _cpu_us(rig: Rig, concurrency: int, calls: int) -> float:
    return measured(rig, concurrency, calls, TURN_TOKENS, "plain")["cpu_us"]


if __name__ == "__main__":
    main()
