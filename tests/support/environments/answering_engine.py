"""An engine whose answer depends on the prompt, so that episodes may run side by side."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tests.support.gateway.fake_engine import FakeEngine


@dataclass(eq=False)
class AnsweringEngine(FakeEngine):
    """`answer` gets the whole prompt as text."""

    answer: Callable[[str], str] = lambda prompt: "hello"
    asked: dict[str, Any] = field(default_factory=dict)
    """The sampling parameters of the request that `answer` answers."""

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.asked = body["sampling_params"]
        prompt = self.tokenizer.decode(body["input_ids"], skip_special_tokens=False)
        self.script.append(self.answer(prompt))
        return await super().generate(request)


class Gate:
    """Answers so many calls, and the others once it is opened: a test may kill who calls in the middle."""

    def __init__(self, open_for: int, answer: Callable[[str], str]) -> None:
        self.left, self.opened, self._answer = open_for, threading.Event(), answer

    def answer(self, prompt: str) -> str:
        self.left -= 1
        if self.left < 0:
            self.opened.wait(180)
        return self._answer(prompt)
