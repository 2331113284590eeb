"""An engine whose answer depends on the prompt, so that episodes may run side by side."""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from tests.support.gateway.fake_engine import FakeEngine


@dataclass(eq=False)
class AnsweringEngine(FakeEngine):
    """`answer` gets the whole prompt as text."""

    answer: Callable[[str], str] = lambda prompt: "hello"

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        prompt = self.tokenizer.decode(body["input_ids"], skip_special_tokens=False)
        self.script.append(self.answer(prompt))
        return await super().generate(request)
