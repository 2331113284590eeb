"""A process that takes SGLang's command line and answers as `FakeEngine` does."""

import argparse
import asyncio
import sys
from pathlib import Path

import httpx
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollout_server.weights.policy import LocalPolicy
from tests.support.rollout_server.fakes import FakeEngine

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
    parser.add_argument("--port", type=int)
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--weight-version", type=int)
    given, _ = parser.parse_known_args([word for word in sys.argv[1:] if word not in ("-m", "-c")])
    engine = FakeEngine()
    engine.running = 0
    asyncio.run(engine.start(LocalPolicy(given.weight_version, given.model_path)))

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        content = await request.body()
        said = await engine.handle(httpx.Request(request.method, str(request.url), content=content))
        await Response(said.content, said.status_code)(scope, receive, send)

    uvicorn.run(answer, host="127.0.0.1", port=given.port, log_level="warning", lifespan="off")


if __name__ == "__main__":
    main()
