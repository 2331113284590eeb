"""An engine that dies of a word. In its own process: `python -m …mortal_engine PORT TOKENIZER`."""

import asyncio
import os
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable
from pathlib import Path
from threading import Event
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from gateway.language.tokenizer_files import tokenizer_of
from tests.support.gateway.fake_engine import Dead, FakeEngine, Interruption

POISON = "poison"
"""An engine dies of a prompt with this word."""
TOKENS, STOP_AT = 60, 20
ANSWER = [10 + n % 50 for n in range(TOKENS)]


class MortalEngine(FakeEngine):
    """It dies when it has given `fuse` tokens of an answer to a poisoned prompt. Other answers stop after
    `stop_at` tokens until `flows`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        die: Callable[[], object],
        flows: Event,
        fuse: int = 0,
        stop_at: int = STOP_AT,
    ) -> None:
        super().__init__(tokenizer, mind=ANSWER, stall_after=stop_at)
        self.die, self.flows, self.fuse, self.begun = die, flows, fuse, 0
        self.holds = False
        """Whether it has other prompts wait before their first token."""
        self.held = 0
        self.gone = False
        """Whether it breaks an answer off and does not live when it is asked after that. Then it is back."""
        self.broken_off = 0

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/ping", self.ping), *super().app().router.routes])

    async def ping(self, _: Request) -> Response:
        status = 502 if self.gone else 200
        self.gone = self.gone and not self.broken_off
        return Response(status_code=status)

    async def generate(self, request: Request) -> Response:
        body = await request.json()  # Starlette keeps it, so what is changed here is what `super` reads
        body["sampling_params"]["stream_interval"] = 1
        if self.gone:
            self.broken_off += 1
            return StreamingResponse(self._cut_off(b""), media_type="text/event-stream")
        poisoned = POISON in self.tokenizer.decode(body["input_ids"])
        self.interruptions.append(Interruption(self.fuse, "reset") if poisoned else None)
        response = await super().generate(request)
        if self.holds and not poisoned and isinstance(response, StreamingResponse):
            self.held += 1
            response.body_iterator = self.later(response.body_iterator)
        return response

    async def later(self, answer: AsyncIterable[Any]) -> AsyncIterator[Any]:
        while self.holds:  # noqa: ASYNC110 - the test that ends it runs in another thread
            await asyncio.sleep(0.005)  # until the test lets the answers begin
        async for event in answer:
            yield event

    def _last_words(self, interruption: Interruption, end: int, ids: list[int]) -> bytes:
        self.die()
        raise Dead

    async def _stall(self) -> None:
        self.begun += 1
        while not self.flows.is_set():  # noqa: ASYNC110 - the test that sets it runs in another thread
            await asyncio.sleep(0.005)  # until the test lets the answers flow


if __name__ == "__main__":
    always = Event()
    always.set()
    engine = MortalEngine(tokenizer_of(Path(sys.argv[2]).parent), lambda: os._exit(1), always)
    uvicorn.run(engine.app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
