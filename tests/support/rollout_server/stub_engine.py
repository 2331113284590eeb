"""An engine double that answers over HTTP as `FakeEngine` does. It samples, too (`weights_sampler`).

As a process, it takes SGLang's command line, and asks for the key of `keyed.py`. In the directory of the
variable ENGINE_DOUBLE_DIR, `engine-{port}.json` has its `Faults`. Without `tokenizer.json` there, it does not
sample.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.language.tokenizer_files import tokenizer_of
from rollout_server.weights.locations import LocalPolicy
from tests.support.rollout_server.fakes import FakeEngine
from tests.support.rollout_server.weights_sampler import WeightsSampler

ROOT = Path(__file__).parents[3]
DELAYS = {"/update_weights_from_disk": "load_s", "/weights_checker": "checksum_s"}
Faults = dict[str, Any]
"""How long a load (`load_s`), a checksum (`checksum_s`) and a token (`pace_s`) take, the log-probability that
a version gives every token of a prompt (`scores`), and whether it has started (`ready`). In this process,
`load` may be called when a load begins, and returns a function that says whether it may end."""


class StubEngine:
    """The engine's ASGI application. It asks for its faults each time."""

    def __init__(
        self,
        policy: LocalPolicy,
        tokenizer: Path,
        faults: Callable[[], Faults],
        die: Callable[[], Awaitable[object]],
        key: str | None = None,
    ) -> None:
        """`die` ends the engine where SGLang dies, and does not return."""
        self._policy, self._faults, self._die, self._key = policy, faults, die, key
        self._engine = FakeEngine()
        self._engine.running = 0
        self._tokenizer = tokenizer_of(tokenizer.parent) if tokenizer.exists() else None
        self._sampler: WeightsSampler | None = None
        self.answers = 0
        """How many calls it has sampled for."""

    async def start(self) -> None:
        await self._engine.start(self._policy)
        if self._tokenizer is not None:
            self._sampler = WeightsSampler(
                self._engine, self._tokenizer, lambda: float(self._faults().get("pace_s", 0.01)), self._die
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await self.start()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        request = Request(scope, receive)
        content = await request.body()
        answer = await self._answer(request, content)
        await answer(scope, receive, send)

    async def _answer(self, request: Request, content: bytes) -> Response:
        path = request.url.path
        if self._key is not None and request.headers.get("authorization") != f"Bearer {self._key}":
            return Response("Unauthorized", 401)
        if path == "/ready" and not self._faults().get("ready", True):
            return Response("it starts", 503)
        if self._sampler is not None and path == "/generate":
            return self._generate(self._sampler, json.loads(content))
        if path in DELAYS:
            await asyncio.sleep(self._faults().get(DELAYS[path], 0.0))  # the time that a large model takes
        if path == "/update_weights_from_disk" and (load := self._faults().get("load")) is not None:
            over = load()
            while not over():  # noqa: ASYNC110 - it asks about other threads
                await asyncio.sleep(0.01)
        try:
            answered = await self._engine.handle(
                httpx.Request(request.method, str(request.url), content=content)
            )
        except httpx.ReadError:
            await self._die()
            raise
        if self._sampler is not None and path == "/update_weights_from_disk":
            self._sampler.note_weights()
        return Response(answered.content, answered.status_code)

    def _generate(self, sampler: WeightsSampler, body: dict[str, Any]) -> Response:
        engine, adapter = self._engine, body.get("lora_path")
        if adapter is not None and adapter not in engine.adapters:
            message = f"Got LoRA adapter that has never been loaded: {adapter}"
            return JSONResponse({"error": {"message": message}}, 400)
        version = engine.version if adapter is None else str(int(adapter.rpartition("-")[0][-8:]))
        if (scores := _scores(body, version, self._faults())) is not None:
            return JSONResponse(scores)
        if "stream" not in body:  # the rollout server tries an adapter
            return JSONResponse({"meta_info": {"output_token_logprobs": [[-1.5, 0, None]]}})
        self.answers += 1
        return StreamingResponse(sampler.events(body), media_type="text/event-stream")


def _scores(body: dict[str, Any], version: str, faults: Faults) -> dict[str, Any] | None:
    """The answer to a request for the log-probabilities of its prompt; None for other requests."""
    start = body.get("logprob_start_len", -1)
    if start < 0:
        return None
    logprob = faults.get("scores", {}).get(version, -1.0)
    scored = [
        [None if index == 0 else logprob, each, None] for index, each in enumerate(body["input_ids"][start:])
    ]
    return {"output_ids": [0], "meta_info": {"input_token_logprobs": scored, "weight_version": version}}


def stub_interpreter(directory: Path) -> Path:
    """A program for the setting `engine_python`. It starts this module in place of the given one."""
    program = directory / "engine-python"
    program.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={ROOT}:{ROOT}/queue\n"
        f'exec {sys.executable} -m tests.support.rollout_server.stub_engine "$@"\n'
    )
    program.chmod(0o755)
    return program


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int)
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--weight-version", type=int)
    given, others = parser.parse_known_args([word for word in sys.argv[1:] if word not in ("-m", "-c")])
    keyed = others and others[0].endswith("keyed.py")
    directory = Path(os.environ.get("ENGINE_DOUBLE_DIR", "."))
    faults = directory / f"engine-{given.port}.json"

    async def die() -> None:
        signal.raise_signal(signal.SIGKILL)

    engine = StubEngine(
        LocalPolicy(given.weight_version, given.model_path),
        directory / "tokenizer.json",
        lambda: dict(json.loads(faults.read_text())) if faults.exists() else {},
        die,
        Path(others[1]).read_text() if keyed else None,
    )
    uvicorn.run(engine, host=given.host, port=given.port, log_level="warning", lifespan="on")


if __name__ == "__main__":
    main()
