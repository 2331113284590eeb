"""A process that takes SGLang's command line and answers as `FakeEngine` does. It samples, too, and it asks
for the key of `keyed.py`.

In the directory of the variable ENGINE_DOUBLE_DIR, `engine-{port}.json` says how long a load (`load_s`), a
checksum (`checksum_s`) and a token (`pace_s`) take, and the log-probability that a version gives every token
of a prompt (`scores`). It is read each time. If `tokenizer.json` is there, `/generate` samples
(`weights_sampler`). The process ends where `FakeEngine` dies.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from rollout_server.weights.policy import LocalPolicy
from tests.support.rollout_server.fakes import FakeEngine
from tests.support.rollout_server.weights_sampler import WeightsSampler

ROOT = Path(__file__).parents[3]


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
    key = Path(others[1]).read_text() if keyed else None
    engine = FakeEngine()
    engine.running = 0
    asyncio.run(engine.start(LocalPolicy(given.weight_version, given.model_path)))
    directory = Path(os.environ.get("ENGINE_DOUBLE_DIR", "."))
    control, tokenizer = directory / f"engine-{given.port}.json", directory / "tokenizer.json"
    delays = {"/update_weights_from_disk": "load_s", "/weights_checker": "checksum_s"}

    def controls() -> dict[str, Any]:
        return dict(json.loads(control.read_text())) if control.exists() else {}

    sampler = (
        WeightsSampler(
            engine, Tokenizer.from_file(str(tokenizer)), lambda: float(controls().get("pace_s", 0.01))
        )
        if tokenizer.exists()
        else None
    )

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        content = await request.body()
        if key is not None and request.headers.get("authorization") != f"Bearer {key}":
            await Response("Unauthorized", 401)(scope, receive, send)
            return
        if sampler is not None and request.url.path == "/generate":
            await _generate(engine, sampler, json.loads(content), controls())(scope, receive, send)
            return
        if request.url.path in delays:
            delay_s = controls().get(delays[request.url.path], 0.0)
            await asyncio.sleep(delay_s)  # the time that a large model takes
        asked = httpx.Request(request.method, str(request.url), content=content)
        try:
            answered = await engine.handle(asked)
        except httpx.ReadError:
            signal.raise_signal(signal.SIGKILL)
        if sampler is not None and request.url.path == "/update_weights_from_disk":
            sampler.note_weights()
        await Response(answered.content, answered.status_code)(scope, receive, send)

    uvicorn.run(answer, host=given.host, port=given.port, log_level="warning", lifespan="off")


def _generate(
    engine: FakeEngine, sampler: WeightsSampler, body: dict[str, Any], controls: dict[str, Any]
) -> Response:
    adapter = body.get("lora_path")
    if adapter is not None and adapter not in engine.adapters:
        message = f"Got LoRA adapter that has never been loaded: {adapter}"
        return JSONResponse({"error": {"message": message}}, 400)
    version = engine.version if adapter is None else str(int(adapter.rpartition("-")[0][-8:]))
    if (scores := _scores(body, version, controls)) is not None:
        return JSONResponse(scores)
    if "stream" not in body:  # the rollout server tries an adapter
        return JSONResponse({"meta_info": {"output_token_logprobs": [[-1.5, 0, None]]}})
    return StreamingResponse(sampler.events(body), media_type="text/event-stream")


def _scores(body: dict[str, Any], version: str, controls: dict[str, Any]) -> dict[str, Any] | None:
    """The answer to a request for the log-probabilities of its prompt; None for other requests."""
    start = body.get("logprob_start_len", -1)
    if start < 0:
        return None
    logprob = controls.get("scores", {}).get(version, -1.0)
    scored = [
        [None if index == 0 else logprob, each, None] for index, each in enumerate(body["input_ids"][start:])
    ]
    return {"output_ids": [0], "meta_info": {"input_token_logprobs": scored, "weight_version": version}}


if __name__ == "__main__":
    main()
