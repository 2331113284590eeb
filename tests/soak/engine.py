"""One engine of the soak, in its own process: `python -m tests.soak.engine PORT TOKENIZER`.

It gives every call the same answer, so that an agent can tell whether its answer is whole. A call for more
than 1000 tokens gets a long answer without pauses, which is larger than the buffers of a connection. A call
for DEADLY_TOKENS ends the process.
"""

import os
import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tokenizers import Tokenizer

from gateway.language.tokenizer_files import tokenizer_of
from tests.support.gateway.fake_engine import FakeEngine

LETTERS = [10 + number % 50 for number in range(60)]
"""The ids of the answer. The tiny model's tokenizer writes each of them as one character."""
LONG_TOKENS, LONG_INTERVAL = 50_000, 500
"""How many tokens the long answer has, and how many each of its events has."""
PACE_S = 0.005
MANY_TOKENS = 1000
"""A call that may have more tokens than this gets the long answer."""
DEADLY_TOKENS = 999


class SoakEngine:
    """Two fake engines behind one address. They forget every request, since a soak has very many."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._usual = FakeEngine(tokenizer, mind=LETTERS, pace_s=PACE_S)
        self._long = FakeEngine(tokenizer, mind=[300] * LONG_TOKENS)

    def app(self) -> Starlette:
        routes = self._usual.app().router.routes
        return Starlette(routes=[Route("/generate", self.generate, methods=["POST"]), *routes])

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        if body["sampling_params"]["max_new_tokens"] == DEADLY_TOKENS:
            os._exit(1)
        many = body["sampling_params"]["max_new_tokens"] > MANY_TOKENS
        engine = self._long if many else self._usual
        if many:
            # Starlette's request keeps the decoded body, so the fake engine reads the changed one.
            body["sampling_params"]["stream_interval"] = LONG_INTERVAL
        response = await engine.generate(request)
        engine.requests.clear()
        engine.aborted.clear()
        return response


if __name__ == "__main__":
    port, file = sys.argv[1:]
    app = SoakEngine(tokenizer_of(Path(file).parent)).app()
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", access_log=False)
