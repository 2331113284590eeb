"""A closed-loop load: each connection sends a call, reads the whole answer, and sends the next call.

python -m bench.load PORT CONCURRENCY CALLS TOKENS KIND     prints one JSON object

A kind is `plain` or `stream` (chat completions), `responses`, `messages`, `completions`, or `engine`.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import httptools
import uvloop

PROMPT = "please tell me what the value of the tool named a is, and say it twice, thank you very much: {}"
GROUP = 8
"""The number of sessions with the same prompt, as in a group of episodes. Groups have different prompts."""


def engine_request(tokens: int, interval: int = 64) -> bytes:
    """The call as a gateway would send it to the engine."""
    asked = {"max_new_tokens": tokens, "stream_interval": interval}
    body = json.dumps({"input_ids": list(range(64)), "sampling_params": asked}).encode()
    return b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def call_of(kind: str, tokens: int, prompt: str) -> tuple[str, dict[str, object]]:
    """The path and the body of a call."""
    asked: dict[str, object] = {"model": "policy", "max_tokens": tokens}
    match kind:
        case "responses":
            return "responses", {
                "model": "policy",
                "max_output_tokens": tokens,
                "input": prompt,
                "store": False,
            }
        case "completions":
            return "completions", asked | {"prompt": prompt}
    asked |= {"messages": [{"role": "user", "content": prompt}], "stream": kind == "stream"}
    return ("messages" if kind == "messages" else "chat/completions"), asked


def request(tokens: int, kind: str, task: str = "") -> bytes:
    """One call as bytes, with the headers of the official client."""
    path, asked = call_of(kind, tokens, PROMPT.format(task))
    body = json.dumps(asked).encode()
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/json\r\n"
        "content-type: application/json\r\nuser-agent: OpenAI/Python 3.54.0\r\n"
        "authorization: Bearer bench-client\r\nx-stainless-lang: python\r\n"
        "x-stainless-package-version: 3.54.0\r\nx-stainless-os: Linux\r\nx-stainless-arch: x64\r\n"
        "x-stainless-runtime: CPython\r\nx-stainless-retry-count: 0\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def calls_of(calls: int, tokens: int, kind: str) -> list[bytes]:
    """The calls as bytes. `tokens` is the length of each answer."""
    if kind == "engine":
        return [engine_request(tokens)] * calls
    tasks = [f"{os.getpid()} {number}" for number in range(-(-calls // GROUP))]
    groups = ([request(tokens, kind, task)] * GROUP for task in tasks)
    return [call for group in groups for call in group][:calls]


@dataclass
class LoadTally:
    """Latencies and failures of the calls."""

    calls: int
    latencies_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def report(self, wall_s: float) -> dict[str, object]:
        ordered = sorted(self.latencies_ms)
        return {
            "failures": len(self.failures),
            "first_failure": self.failures[0] if self.failures else None,
            "per_s": round(self.calls / wall_s, 1),
            "p50_ms": round(statistics.median(ordered), 3) if ordered else None,
            "p99_ms": round(ordered[int(len(ordered) * 0.99)], 3) if ordered else None,
        }


class Client(asyncio.Protocol):
    """One connection, with one call at a time."""

    def __init__(self, requests: Iterator[bytes], tally: LoadTally, stream: bool, done: asyncio.Future[None]):
        self._requests = requests
        self._tally = tally
        self._stream = stream
        self._done = done
        self._warm = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)
        self._next()

    def _next(self) -> None:
        call = next(self._requests, None)
        if call is None:
            self._transport.close()
            return
        self._tail = b""
        self._started = time.perf_counter()
        self._transport.write(call)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._tail = (self._tail + body)[-200:]

    def on_message_complete(self) -> None:
        tally, status = self._tally, self._parser.get_status_code()
        ended = self._tail.endswith(b"data: [DONE]\n\n") if self._stream else self._tail.endswith(b"}")
        if status != 200 or not ended:
            tally.failures.append(f"{status} {self._tail!r}")
        elif self._warm:  # the first call also waits until the connection is accepted
            tally.latencies_ms.append((time.perf_counter() - self._started) * 1000)
        self._warm = True
        self._next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def run(port: int, concurrency: int, calls: int, tokens: int, kind: str) -> dict[str, object]:
    """Make `calls` calls. They name no session, so each opens a new one. Returns the figures by name."""
    loop = asyncio.get_running_loop()
    tally = LoadTally(calls)
    requests, stream = iter(calls_of(calls, tokens, kind)), kind in ("stream", "engine")
    ends = [loop.create_future() for _ in range(concurrency)]
    started = time.perf_counter()
    for end in ends:
        client = partial(Client, requests, tally, stream, end)
        await loop.create_connection(client, "127.0.0.1", port)
    await asyncio.gather(*ends)
    return tally.report(time.perf_counter() - started)


if __name__ == "__main__":
    port, concurrency, calls, tokens = map(int, sys.argv[1:5])
    print(json.dumps(uvloop.run(run(port, concurrency, calls, tokens, sys.argv[5]))))
