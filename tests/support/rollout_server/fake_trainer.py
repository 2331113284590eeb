"""A trainer that offers tensors: its HTTP answers, and a port on which nothing more happens."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from rollout_queue.protocol.rollout_server_messages import JoinBody, Joining, SentTensor
from rollout_server.weights.weight_files import fingerprint, tensors_of

URL = "http://127.0.0.1:8200"
GROUP = "weir-1-group"


class FakeTrainer:
    """Answers the calls of `TensorReceiver`. The tensors are those of `directory`, each in its own bucket."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.directory = Path()
        self.refusal: httpx.Response | None = None
        """Answers every call."""
        self.more: list[SentTensor] = []
        """Sent besides the tensors of the files."""
        self.calls: list[tuple[str, str]] = []
        self.keys: set[str | None] = set()

    async def handle(self, request: httpx.Request) -> httpx.Response:
        self.calls.append((request.method, request.url.path))
        self.keys.add(request.headers.get("authorization"))
        if self.refusal is not None:
            return self.refusal
        if request.method == "GET":
            return httpx.Response(200, json={"held": True})
        if request.method == "DELETE":
            return httpx.Response(200, json={"ended": True})
        body = JoinBody.model_validate(json.loads(request.content))
        return httpx.Response(200, json=self._joining(body).model_dump(mode="json"))

    def _joining(self, body: JoinBody) -> Joining:
        sent = [
            SentTensor(name=name, dtype="float32", shape=stored.shape, fingerprint=fingerprint(path, stored))
            for name, (path, stored) in tensors_of(self.directory).items()
        ]
        return Joining(
            master_address="127.0.0.1",
            master_port=self.port,
            group=GROUP,
            backend="gloo",
            world_size=1 + body.ranks,
            buckets=tuple((each,) for each in (*sent, *self.more)),
        )


@asynccontextmanager
async def fake_trainer() -> AsyncIterator[FakeTrainer]:
    async def ignore(_: asyncio.StreamReader, writer: Any) -> None:
        writer.close()

    async with await asyncio.start_server(ignore, "127.0.0.1", 0) as server:
        yield FakeTrainer(server.sockets[0].getsockname()[1])
