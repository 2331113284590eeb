"""A stand-in for SGLang's `/generate` that costs almost nothing, so that a benchmark measures the gateway.

python -m bench.engine PORT [PACE_MS [LOAD]]     each token takes PACE_MS; 0 sends as fast as it can

It reports the LOAD, a share of its key-value cache. Without one, gateways have no limit of calls for it.
"""

import asyncio
import json
import re
import sys
from functools import lru_cache
from typing import cast

import httptools
import uvloop

FIRST_ID = 558
IDS = 187
"""Answers consist of ids in [FIRST_ID, FIRST_ID + IDS), ordinary tokens of the benchmark's tokenizer. None of
them ends with a space: the gateway holds spaces back, because the text of an answer has none at its end."""
INFO: dict[str, object] = {"model_path": "bench", "weight_version": "0"}
"""The answer on every path but `/generate`."""


@lru_cache(maxsize=256)
def events(tokens: int, interval: int) -> tuple[bytes, ...]:
    """The HTTP chunks of one streamed answer, as SGLang 0.5.23 sends them."""
    chunks = []
    for start in range(0, tokens, interval):
        end = min(tokens, start + interval)
        ids = [FIRST_ID + (index * 37) % IDS for index in range(start, end)]
        meta: dict[str, object] = {
            "id": "0123456789abcdef0123456789abcdef",
            "finish_reason": {"type": "length", "length": tokens} if end == tokens else None,
            "prompt_tokens": 32,
            "weight_version": "0",
            "input_token_logprobs": [],
            "output_token_logprobs": [[-0.5108256, token_id, None] for token_id in ids],
            "output_token_logprobs_length": end,
            "reasoning_tokens": 0,
            "completion_tokens": end,
            "cached_tokens": 0,
            "num_retractions": 0,
        }
        if end == tokens:
            meta["e2e_latency"] = 0.1234
            meta["weight_versions"] = [{"version": "0", "start": 0, "end": tokens}]
        event = json.dumps({"text": " word" * len(ids), "output_ids": ids, "meta_info": meta})
        chunks.append(_chunk(b"data: " + event.encode() + b"\n\n"))
    return (*chunks, _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class EngineStub(asyncio.Protocol):
    """One connection. The class counts the answers of all connections."""

    pace_s = 0.0
    info = json.dumps(INFO).encode()
    generated = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body, self._body = b"".join(self._body), []
        if not self._url.startswith(b"/generate"):
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            self._transport.write(head % len(self.info) + self.info)
            return
        EngineStub.generated += 1
        tokens, interval = _number(body, b"max_new_tokens"), _number(body, b"stream_interval")
        chunks = events(tokens, interval)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        if self.pace_s:
            asyncio.get_running_loop().create_task(self._paced(head, chunks, min(interval, tokens)))
        else:
            self._transport.write(head + chunks[0])
            for chunk in chunks[1:]:
                self._transport.write(chunk)

    async def _paced(self, head: bytes, chunks: tuple[bytes, ...], interval: int) -> None:
        self._transport.write(head)
        for chunk in chunks[:-1]:
            await asyncio.sleep(self.pace_s * interval)
            self._transport.write(chunk)
        self._transport.write(chunks[-1])


def _number(body: bytes, name: bytes) -> int:
    found = re.search(b'"' + name + rb'":\s*(\d+)', body)
    if found is None:
        raise ValueError(f"the call has no field {name.decode()}")
    return int(found[1])


async def main(port: int, pace_ms: float = 0.0, load: float | None = None) -> None:
    EngineStub.pace_s = pace_ms / 1000
    if load is not None:
        EngineStub.info = json.dumps(INFO | {"loads": [{"token_usage": load}]}).encode()
    server = await asyncio.get_running_loop().create_server(EngineStub, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), *map(float, sys.argv[2:])))
