"""A model that grades by a script, in this process and as a small OpenAI server."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from reward_service.graders.grade import TokenUsage
from reward_service.judging import JudgeAnswer, JudgeCall

Script = Callable[[dict[str, Any]], "ScriptedReply"]


@dataclass
class ScriptedReply:
    """What the server answers to one call."""

    content: str | None = ""
    refusal: str | None = None
    finish_reason: str = "stop"
    status: int = 200


@dataclass
class ScriptedModel:
    """`JudgeModelClient` without a network: it returns its answers, one after the other."""

    answers: list[JudgeAnswer | Exception]
    calls: list[JudgeCall] = field(default_factory=list)

    async def ask(self, call: JudgeCall) -> JudgeAnswer:
        self.calls.append(call)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        """It leaves nothing behind."""


def said(text: str, **more: Any) -> JudgeAnswer:
    """An answer of 7 + 3 tokens."""
    return JudgeAnswer(text, "judge-1", TokenUsage(7, 3, 10, 0), **more)


@dataclass
class ScriptedOpenAi:
    """An ASGI application with `POST /v1/chat/completions`."""

    reply: Script
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    hang: asyncio.Event | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        given = await request.json()
        self.bodies.append(given)
        self.keys.append(request.headers.get("authorization", ""))
        reply = self.reply(given)
        said = {"role": "assistant", "content": reply.content, "refusal": reply.refusal}
        answer = {
            "id": "c1",
            "object": "chat.completion",
            "created": 1,
            "model": f"{given['model']}-2026",
            "choices": [{"index": 0, "finish_reason": reply.finish_reason, "message": said}],
            "usage": {
                "prompt_tokens": 11,
                "completion_tokens": 4,
                "total_tokens": 15,
                "prompt_tokens_details": {"cached_tokens": 2},
            },
        }
        failed = {"error": {"message": "overloaded", "type": "server_error", "param": None, "code": None}}
        sent = answer if reply.status == 200 else failed
        await JSONResponse(sent, reply.status)(scope, receive, send)
