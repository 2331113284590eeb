"""Measures one gateway with many open sessions and many live streams: its memory, and how late tokens are.

python -m bench.capacity [--sessions N] [--streams N] [--pace-ms MS] [--tokens N]

Every stream gets one token each PACE_MS, and all streams live at once. A *gap* is the time between two
tokens of a stream, as the client sees it."""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from subprocess import run as run_process
from typing import cast

import httptools
import uvloop

from bench.gateway import Rig, measured, running_rig
from bench.load import engine_request, request
from bench.processes import cpu_s, module
from tests.support.tiny_model import make_tiny_model

CONNECTS_AT_ONCE = 64
SETTLE_S = 1.0
"""The gaps of a stream's first second are left out, because the streams all begin in it."""


class StreamClient(asyncio.Protocol):
    """One stream: notes the gap before each piece of its answer."""

    def __init__(self, call: bytes, gaps_ms: list[float], done: asyncio.Future[None]) -> None:
        self._call, self._gaps_ms, self._done = call, gaps_ms, done
        self._parser = httptools.HttpResponseParser(self)
        self._last = self._began = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._call)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._began = self._began or now
        if self._last - self._began > SETTLE_S:
            self._gaps_ms.append((now - self._last) * 1000)
        self._last = now
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() == 200:
            self._done.set_result(None)
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(f"a stream broke off: {error}"))


async def listen(port: int, streams: int, tokens: int, engine: bool) -> dict[str, float]:
    """Hear so many streams at once. Returns figures of the gaps, in ms."""
    loop, gaps, ends = asyncio.get_running_loop(), list[float](), list[asyncio.Future[None]]()
    connecting = asyncio.Semaphore(CONNECTS_AT_ONCE)

    async def connect(number: int) -> None:
        ends.append(end := loop.create_future())
        call = engine_request(tokens, 1) if engine else request(tokens, "stream", f"capacity {number}")
        async with connecting:
            await loop.create_connection(partial(StreamClient, call, gaps, end), "127.0.0.1", port)

    await asyncio.gather(*map(connect, range(streams)))
    await asyncio.gather(*ends)
    gaps.sort()
    return {"p50": gaps[len(gaps) // 2], "p99": gaps[int(len(gaps) * 0.99)], "longest": gaps[-1]}


def heard(port: int, streams: int, tokens: int, kind: str) -> dict[str, float]:
    """`listen` in a process of its own."""
    command = module("bench.capacity", "listen", port, streams, tokens, kind)
    done = run_process(command, check=True, capture_output=True, text=True)
    return cast(dict[str, float], json.loads(done.stdout))


def peak_mib(pid: int) -> float:
    """The most memory that the process has had so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10


def table(rig: Rig, sessions: int, streams: int, tokens: int) -> str:
    """Measure, and write the table."""
    (port, pid), rows = (
        rig.gateways[0],
        ["| | peak MiB | gap p50 ms | p99 | longest | CPU |", "|---|---|---|---|---|---|"],
    )
    rows.append(f"| no session | {peak_mib(pid):.0f} | | | | |")
    measured(rig, 32, sessions, 1, "plain")  # one token has no pace
    rows.append(f"| {sessions} open sessions | {peak_mib(pid):.0f} | | | | |")
    for label, to, kind in (("engine alone", rig.engine_port, "engine"), ("gateway", port, "gateway")):
        began, used = time.perf_counter(), cpu_s(pid)
        gaps = heard(to, streams, tokens, kind)
        share = (cpu_s(pid) - used) / (time.perf_counter() - began)
        peak = "" if kind == "engine" else f"{peak_mib(pid):.0f}"
        shown = " | ".join(f"{gaps[name]:.1f}" for name in ("p50", "p99", "longest"))
        rows.append(f"| {streams} streams, {label} | {peak} | {shown} | {share:.0%} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--pace-ms", type=float, default=200.0)
    parser.add_argument("--tokens", type=int, default=100)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_model(Path(name) / "model")
        with running_rig(model, Path(name), asked.pace_ms) as rig:
            print(table(rig, asked.sessions, asked.streams, asked.tokens))


if __name__ == "__main__":
    if sys.argv[1:2] == ["listen"]:
        port, streams, tokens = map(int, sys.argv[2:5])
        print(json.dumps(uvloop.run(listen(port, streams, tokens, sys.argv[5] == "engine"))))
    else:
        main()
