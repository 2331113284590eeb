"""Measures whether a long prompt delays other calls: the pauses in streams during prompts of 100,000 tokens.

python -m bench.stall [--tokens N] [--prompts N]
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import uvloop

from bench.gateway import running_rig
from bench.load import request
from tests.support.tiny_model import make_tiny_model

PACE_MS = 5.0
STREAMS = 8


async def call(port: int, body: bytes, gaps_ms: list[float] | None = None) -> float:
    """Make one call. Returns its seconds, and appends the times between received pieces to `gaps_ms`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)
    started = time.perf_counter()
    writer.write(body)
    last = None
    while data := await reader.read(2**16):
        now = time.perf_counter()
        if gaps_ms is not None and last is not None:
            gaps_ms.append((now - last) * 1000)
        last = now
        if data.endswith(b"0\r\n\r\n"):  # the last chunk of a stream; other answers close the connection
            break
    writer.close()
    return time.perf_counter() - started


def long_prompt(tokens: int) -> bytes:
    """A call with one message of about `tokens` tokens, and an answer of one token."""
    text = " ".join(f"w{index % 977}" for index in range(tokens // 3))
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 1}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer bench-client\r\n"
    head += f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def streams(port: int, prompts: int, body: bytes) -> tuple[list[float], list[float]]:
    """The gaps of the streams in ms, and the seconds of each long call beside them."""
    gaps: list[float] = []
    short = request(256, "stream")
    listening = [asyncio.create_task(call(port, short, gaps)) for _ in range(STREAMS)]
    await asyncio.sleep(0.3)
    seconds = [await call(port, body) for _ in range(prompts)]
    await asyncio.gather(*listening)
    return gaps, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--prompts", type=int, default=3)
    asked = parser.parse_args()
    os.environ["WEIR_GATEWAY__CONTEXT_LENGTH"] = str(2**20)
    body = long_prompt(asked.tokens)
    print("| | gap p50 ms | p99 | longest | seconds of a long call |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_model(Path(name) / "model")
        with running_rig(model, Path(name), PACE_MS) as rig:
            for label, prompts in (("streams alone", 0), ("with long prompts", asked.prompts)):
                gaps, seconds = uvloop.run(streams(rig.gateways[0][0], prompts, body))
                gaps.sort()
                shown = f"{statistics.median(gaps):.1f} | {gaps[int(len(gaps) * 0.99)]:.1f} | {gaps[-1]:.1f}"
                print(f"| {label} | {shown} | {statistics.median(seconds) if seconds else 0:.2f} |")


if __name__ == "__main__":
    main()
