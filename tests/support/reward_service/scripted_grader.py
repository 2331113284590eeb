"""A grader behind a URL that answers by a script."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

Answer = float | bytes | int | None
"""A number is a reward; bytes are the whole body; None is no opinion."""


@dataclass
class ScriptedGrader:
    """An ASGI application. `answer(body)` tells what it answers to a call."""

    answer: Callable[[dict[str, Any]], Answer]
    status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    hang: bool = False
    """Whether it answers nothing until `let_answer` is called."""
    called: Event = field(default_factory=Event)
    answers: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        if not self.hang:
            self.let_answer()

    def let_answer(self) -> None:
        """Answer the calls that wait, and all later ones."""
        self.answers.set()

    def attempts(self, session_id: str) -> list[int]:
        """The attempts of the calls about a session."""
        return [body["attempt"] for body in self.bodies if body["sessions"][0]["session_id"] == session_id]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        given = await request.json()
        self.bodies.append(given)
        self.headers.append(dict(request.headers))
        self.called.set()
        await asyncio.to_thread(self.answers.wait)
        answer = self.answer(given)
        reward = {"session_id": given["sessions"][0]["session_id"], "value": answer}
        sent = answer if isinstance(answer, bytes) else json.dumps({"rewards": [reward]}).encode()
        await Response(sent, self.status, media_type="application/json")(scope, receive, send)
