"""Calls a model through chat completions: at any server of OpenAI's kind, or at Weir's gateway.

JudgeModelClient
├── OpenAiModel     POST {base_url}/chat/completions
└── GatewayModel    POST /sessions {"train": false} ─▶ its chat completions ─▶ POST …/finish as abandoned

`abandoned`, because a session that is `completed` would wait for a reward itself.
"""

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import msgspec

from reward_service.bounded import AnswerTooLarge, read_bounded
from reward_service.graders.grade import TokenUsage
from reward_service.judging.settings import JudgeSettings
from rollout_queue import clock
from rollout_queue.contract.ids import new_id
from rollout_queue.foreign_json import read_json
from rollout_queue.http.keys import bearer
from rollout_queue.protocol.errors import error_message

logger = logging.getLogger(__name__)

ANSWER_BYTES = 4 * 2**20
TOO_BUSY = (429, 503)
PAUSES_S = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, *itertools.repeat(12.8, 1000))
"""The shortest pauses before a server that is too busy is asked again."""
LAST_ENDS_S = 3.0
"""How long sessions of judges may still take to end when the service stops."""
JUDGE_PREFIX = "weir-judge-"
"""The ids of the sessions of judges begin so. They are graded by nobody."""


class JudgeUnavailable(Exception):
    """The model did not answer."""


@dataclass(frozen=True)
class JudgeCall:
    """What a model is asked."""

    model: str
    messages: Sequence[Mapping[str, str]]
    response_format: Mapping[str, Any]
    sampling: Mapping[str, Any]
    """Fields of a chat completion."""
    grader: str = ""
    """The grader that asks, for the record."""

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": list(self.messages),
            "response_format": self.response_format,
            **self.sampling,
        }


@dataclass(frozen=True)
class JudgeAnswer:
    """What a model answered."""

    text: str
    model: str
    usage: TokenUsage
    refusal: str | None = None
    cut_off: bool = False


class JudgeModelClient(Protocol):
    """Calls models."""

    async def ask(self, call: JudgeCall) -> JudgeAnswer:
        """Raises JudgeUnavailable."""
        ...

    async def close(self) -> None:
        """End what calls have left behind."""
        ...


class OpenAiModel:
    """Models of a server of OpenAI's kind."""

    def __init__(self, settings: JudgeSettings, client: httpx.AsyncClient) -> None:
        self._settings, self._client = settings, client

    async def ask(self, call: JudgeCall) -> JudgeAnswer:
        key = bearer(self._settings.api_key)
        return await completion(
            self._client, f"{self._settings.base_url}", call, key, self._settings.timeout_s
        )

    async def close(self) -> None:
        """As the protocol says; there is nothing."""


class GatewayModel:
    """The models of Weir's gateway. `client` has the gateway's URL and a key."""

    def __init__(self, settings: JudgeSettings, client: httpx.AsyncClient) -> None:
        self._settings, self._client = settings, client
        self._ending: set[asyncio.Task[None]] = set()

    async def ask(self, call: JudgeCall) -> JudgeAnswer:
        session_id = f"{JUDGE_PREFIX}{new_id()}"
        path = f"/sessions/{session_id}"
        opened = {
            "session_id": session_id,
            "train": False,
            "ttl_s": self._settings.ttl_s,
            "metadata": {"weir_judge": call.grader},
        }
        await _post(self._client, "/sessions", opened, self._settings.timeout_s)
        try:
            return await completion(self._client, f"{path}/v1", call, {}, self._settings.timeout_s)
        finally:
            # Who waits for the answer has a time limit, and a busy gateway may take longer than that.
            ending = asyncio.create_task(self._end(path))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        if self._ending:
            with suppress(TimeoutError):
                async with clock.timeout(LAST_ENDS_S):
                    await asyncio.wait(self._ending)
        for ending in self._ending:
            ending.cancel()

    async def _end(self, path: str) -> None:
        with suppress(JudgeUnavailable):  # then the session expires
            ended = {"status": "abandoned", "reason": "the call of a judge"}
            await _post(self._client, f"{path}/finish", ended, self._settings.timeout_s)


class ChatAnswerMessage(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class ChatAnswerChoice(msgspec.Struct):
    message: ChatAnswerMessage
    finish_reason: str | None = None


class ChatAnswerCachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class ChatAnswerUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: ChatAnswerCachedTokens | None = None


class ChatAnswer(msgspec.Struct):
    """A chat completion, as far as it is read here."""

    choices: list[ChatAnswerChoice]
    model: str | None = None
    usage: ChatAnswerUsage | None = None


async def completion(
    client: httpx.AsyncClient, base_url: str, call: JudgeCall, headers: Mapping[str, str], timeout_s: float
) -> JudgeAnswer:
    """Raises JudgeUnavailable."""
    body = await _post(client, f"{base_url}/chat/completions", call.body, timeout_s, headers)
    try:
        answer = read_json(body, ChatAnswer)
        choice = answer.choices[0]
    except (msgspec.DecodeError, IndexError) as error:
        raise JudgeUnavailable(f"the model's server answered no chat completion: {error}") from error
    usage = answer.usage or ChatAnswerUsage()
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    return JudgeAnswer(
        text=choice.message.content or "",
        model=answer.model or call.model,
        usage=TokenUsage(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, cached or 0),
        refusal=choice.message.refusal,
        cut_off=choice.finish_reason == "length",
    )


async def _post(
    client: httpx.AsyncClient, url: str, body: Any, timeout_s: float, headers: Mapping[str, str] | None = None
) -> bytes:
    """The body of a successful answer. A server that is too busy is asked again when it says, until the time
    is over. Raises JudgeUnavailable."""
    busy = ""
    try:
        async with clock.timeout(timeout_s):
            for pause_s in PAUSES_S:
                request = client.build_request("POST", url, json=body, headers=headers, timeout=timeout_s)
                status, answer, wished_s = await read_bounded(client, request, ANSWER_BYTES)
                if status not in TOO_BUSY:
                    break
                busy = f": HTTP {status}: {error_message(answer)}"
                # until the server wants to be asked again
                await clock.sleep(max(wished_s or 0.0, pause_s))
    except TimeoutError as error:
        raise JudgeUnavailable(f"no answer within {timeout_s} s{busy}") from error
    except (httpx.HTTPError, httpx.InvalidURL, AnswerTooLarge) as error:
        raise JudgeUnavailable(f"{type(error).__name__}: {error}") from error
    if not 200 <= status < 300:
        raise JudgeUnavailable(f"HTTP {status}: {error_message(answer)}")
    return answer
