"""The cost of the gateway: CPU per turn and per streamed token, and added latency, with all features on.

python -m bench.gateway [--calls N] [--repetitions N] [--concurrency 1 32 …] [--gateways N] [--workers N]

load (bench.load) ──▶ gateway, rendering and recording to a real Redis ──▶ engine (bench.engine)
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.processes import answering, cpu_s, free_port, module, running, with_children
from tests.support.tiny_model import make_tiny_model
from weir.stack.service_process import executable

TURN_TOKENS, STREAM_TOKENS = 32, 512
REDIS = "--appendonly yes --appendfsync everysec --save  --loglevel warning --bind 127.0.0.1"


@dataclass(frozen=True)
class Rig:
    """Running gateways, and the engine stub behind them."""

    gateways: list[tuple[int, int]]
    """The port and the process id of each."""
    engine_port: int


@contextmanager
def running_rig(
    model: Path,
    folder: Path,
    pace_ms: float = 0.0,
    count: int = 1,
    sampled: Path | None = None,
    workers: int = 1,
    settings: Mapping[str, str] | None = None,
    engine_load: float | None = None,
    command: list[str] | None = None,
) -> Iterator[Rig]:
    """`count` gateways on one Redis, each of `workers` processes, in front of the engine stub, which takes
    `pace_ms` for a token, and reports `engine_load`.

    If a file is given as `sampled`, the call stacks of the gateways are sampled into it. `settings` are more
    variables of the gateways, and `command` starts each.
    """
    redis_port, engine_port, ports = free_port(), free_port(), [free_port() for _ in range(count)]
    redis = [executable(), *REDIS.split(" "), "--port", str(redis_port), "--dir", str(folder)]
    variables = {
        "WEIR_REDIS_URL": f"redis://127.0.0.1:{redis_port}/0",
        "WEIR_MODEL_PATH": str(model),
        "WEIR_ENGINES": f"http://127.0.0.1:{engine_port}",
        "WEIR_CLIENT_KEYS": "bench-client",
        "WEIR_ADMIN_KEYS": "bench-admin",
        "WEIR_GATEWAY__WORKERS": str(workers),
        **(settings or {}),
    }
    gateway = command or module("gateway")
    if sampled is not None:
        gateway = module("bench.stack_sampler", sampled, "gateway")
    with ExitStack() as stack:
        stack.enter_context(running([*redis, "--logfile", str(folder / "redis.log")]))
        stub = [engine_port, pace_ms] if engine_load is None else [engine_port, pace_ms, engine_load]
        stack.enter_context(running(module("bench.engine", *stub)))
        gateways = []
        for port in ports:
            pid = stack.enter_context(running(gateway, {**variables, "WEIR_GATEWAY__PORT": str(port)}))
            answering(f"http://127.0.0.1:{port}/ready", timeout_s=180)
            gateways.append((port, pid))
        yield Rig(gateways, engine_port)


def load(port: int, concurrency: int, calls: int, tokens: int, kind: str) -> dict[str, float]:
    """Run a load in its own process. Returns its figures. Raises SystemExit if a call failed."""
    command = module("bench.load", port, concurrency, calls, tokens, kind)
    report: dict[str, float] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    if report["failures"]:
        raise SystemExit(f"{report['failures']} calls failed: {report['first_failure']}")
    return report


def measured(rig: Rig, concurrency: int, calls: int, tokens: int, kind: str) -> dict[str, float]:
    """Put the same load on every gateway at once. `cpu_us` is the CPU of the gateways per call."""
    processes = [each for _, pid in rig.gateways for each in with_children(pid)]
    before = sum(map(cpu_s, processes))
    with ThreadPoolExecutor(len(rig.gateways)) as pool:
        loads = [pool.submit(load, port, concurrency, calls, tokens, kind) for port, _ in rig.gateways]
        reports = [each.result() for each in loads]
    spent = sum(map(cpu_s, processes)) - before
    total = {"cpu_us": spent / (calls * len(reports)) * 1e6, "per_s": sum(each["per_s"] for each in reports)}
    return {**reports[0], **total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=3000, help="calls of each plain measurement")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128, 512])
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes of each gateway")
    asked = parser.parse_args()
    print(
        "| concurrency | CPU µs/turn | turns/s | p50 ms | p99 ms | engine alone p50 | CPU µs/streamed token |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_rig(
            make_tiny_model(folder / "model"), folder, count=asked.gateways, workers=asked.workers
        ) as rig:
            measured(rig, 8, 500, TURN_TOKENS, "plain")  # warm
            for concurrency in asked.concurrency:
                print(row(rig, concurrency, asked.calls, asked.repetitions), flush=True)


def row(rig: Rig, concurrency: int, calls: int, repetitions: int) -> str:
    """One line of the table, with medians."""
    few = max(calls // 10, concurrency)
    plain, alone, stream = [], [], []
    for _ in range(repetitions):
        plain.append(measured(rig, concurrency, max(calls, concurrency), TURN_TOKENS, "plain"))
        alone.append(load(rig.engine_port, concurrency, max(calls, concurrency), TURN_TOKENS, "engine"))
        stream.append(measured(rig, concurrency, few, STREAM_TOKENS, "stream"))
    cells = [median(plain, name) for name in ("cpu_us", "per_s", "p50_ms", "p99_ms")]
    cells += [median(alone, "p50_ms"), median(stream, "cpu_us") / STREAM_TOKENS]
    return "| {} | {:.0f} | {:.0f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} |".format(concurrency, *cells)


def median(reports: list[dict[str, float]], name: str) -> float:
    return statistics.median(report[name] for report in reports)


if __name__ == "__main__":
    main()
