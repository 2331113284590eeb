"""Calls models that grade, through chat completions: at any server of OpenAI's kind, or at Weir's gateway.

JudgeModelClient
├── OpenAiModel     POST {base_url}/chat/completions
└── GatewayModel    POST /sessions {"train": false} ─▶ its chat completions ─▶ POST …/finish as abandoned

`abandoned`, because a session that is `completed` would wait for a reward itself.

score_model  {"steps": [{"description", "conclusion"}], "result": number}    as OpenAI's guide shows it
label_model  {"steps": […], "result": one of the labels}

Some models think aloud first, or put the object into a fence of Markdown, or into prose. Graders of clients
may ask for some of the operator's models only, and for so many tokens an hour.
"""

import asyncio
import itertools
import json
import logging
import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import httpx
import msgspec
from pydantic import Field, field_validator

from reward_service.bounded import AnswerTooLarge, read_bounded
from reward_service.graders.grade import TokenUsage
from reward_service.graders.grader_objects import AnyGrader, LabelModelGrader, ScoreModelGrader, every_grader
from rollout_queue import clock
from rollout_queue.contract.ids import new_id
from rollout_queue.foreign_json import read_json
from rollout_queue.http.callers import bearer
from rollout_queue.http.errors import ApiError
from rollout_queue.protocol.message import error_message
from rollout_queue.settings import FOR_TESTS, SettingsPart


class JudgeSettings(SettingsPart):
    """How `score_model`, `label_model` and rules of the kind `judge` reach a model."""

    base_url: str | None = None
    """An API of OpenAI's kind, such as https://api.openai.com/v1; null means Weir's gateway. There each call
    is recorded in a session of its own, which is never trained."""
    api_key: str | None = None
    """The key for `base_url`."""
    timeout_s: float = Field(120.0, gt=0)
    """How long one call may take."""
    ttl_s: Annotated[float, FOR_TESTS] = Field(3600.0, gt=0)
    """The life of a session that a judge's call opens at the gateway."""
    client_models: list[str] = []
    """The models that graders of requests with a client key may ask. An admin's graders may ask any."""
    client_tokens_per_hour: int = Field(1_000_000, ge=0)
    """How many tokens, of prompts and answers together, each client key may spend on these models. A call
    that begins before is finished."""

    @field_validator("base_url")
    @classmethod
    def _without_trailing_slash(cls, value: str | None) -> str | None:
        return value.rstrip("/") or None if value else None


MAX_ANSWER_CHARS = 2**18
MAX_BRACES = 1000
"""How many braces may open in an answer that has more than an object."""
THOUGHT_END = "</think>"
FENCE = re.compile(r"```[^\n`]*\n(.*)```", re.DOTALL)


class UnreadableVerdict(Exception):
    """The model's answer has no result."""


def score_format() -> dict[str, Any]:
    """The `response_format` for a score."""
    return _format("score", {"type": "number"})


def label_format(labels: Sequence[str]) -> dict[str, Any]:
    """The `response_format` for a label."""
    return _format("label", {"type": "string", "enum": list(labels)})


def read_score(answer: str) -> float:
    """The finite number in an answer. An answer that is only a number counts, because prompts ask for it.

    Raises UnreadableVerdict.
    """
    result = _result(answer)
    try:
        score = float("nan" if isinstance(result, bool | None) else result)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnreadableVerdict(f"the model answered {answer[:200]!r}, and not a number") from error
    if not math.isfinite(score):
        raise UnreadableVerdict(f"the model answered {answer[:200]!r}, and not a finite number")
    return score


def read_label(answer: str, labels: Sequence[str]) -> str:
    """The label that an answer names, in upper or lower case. Raises UnreadableVerdict."""
    result = _result(answer)
    result = "" if isinstance(result, dict | list | None) else str(result)
    named = [each for each in labels if each == result] or [
        each for each in labels if each.strip().casefold() == result.strip().casefold()
    ]
    if len(named) != 1:
        raise UnreadableVerdict(f"the model answered {answer[:200]!r}, and not one of the labels")
    return named[0]


def _result(answer: str) -> Any:
    """The field `result` of an answer that is an object; any other answer itself."""
    value = value_of(answer, "result")
    return value.get("result") if isinstance(value, dict) else value


def value_of(answer: str, field: str) -> Any:
    """The JSON in an answer: all of it, or what its fence has, or its one object with this field. An answer
    without JSON is its text.

    Objects that differ are no verdict, wherever they stand: a model may quote one that an attempt wrote.
    """
    whole = answer[:MAX_ANSWER_CHARS].strip()
    # A verdict may have the mark in its own words.
    texts = [whole, whole.partition(THOUGHT_END)[2].strip(), whole.rpartition(THOUGHT_END)[2].strip()]
    for candidate in (each for text in texts for each in (text, _inside(text))):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            continue
    objects = _objects(texts[-1], field)
    if objects and all(each == objects[0] for each in objects):
        return objects[0]
    return _inside(texts[-1])


def _inside(text: str) -> str:
    """What the fence has, if the text is nothing but a fence."""
    fence = FENCE.fullmatch(text)
    return fence[1].strip() if fence else text


def _objects(text: str, field: str) -> list[dict[str, Any]]:
    """The objects with this field that a text has, one behind the other."""
    found, place, decoder = list[dict[str, Any]](), text.find("{"), json.JSONDecoder()
    for _ in range(MAX_BRACES):
        if place < 0:
            return found
        try:
            value, end = decoder.raw_decode(text, place)
        except RecursionError:
            return []
        except ValueError:
            value, end = None, place + 1
        if isinstance(value, dict) and field in value:
            found.append(value)
        place = text.find("{", end)
    return []


def _format(name: str, result: dict[str, Any]) -> dict[str, Any]:
    step = {
        "type": "object",
        "properties": {"description": {"type": "string"}, "conclusion": {"type": "string"}},
        "required": ["description", "conclusion"],
        "additionalProperties": False,
    }
    schema = {
        "type": "object",
        "properties": {"steps": {"type": "array", "items": step}, "result": result},
        "required": ["steps", "result"],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": schema}}


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


HOUR_S = 3600.0
CHARS_PER_TOKEN = 4
"""Roughly, for a server that does not report its usage."""


class KeyAllowance(JudgeModelClient):
    """Asks models for the graders of one key. The calls of the last hour are counted."""

    def __init__(self, judge: JudgeModelClient, tokens_per_hour: int) -> None:
        self._judge, self._most = judge, tokens_per_hour
        self._spent: deque[tuple[float, int]] = deque()
        self._sum = 0

    async def ask(self, call: JudgeCall) -> JudgeAnswer:
        """Raises JudgeUnavailable, and ApiError (429) if the tokens of the hour are spent."""
        self.check()
        answer = await self._judge.ask(call)
        characters = sum(len(text) for each in call.messages for text in each.values()) + len(answer.text)
        tokens = answer.usage.total_tokens or characters // CHARS_PER_TOKEN
        self._spent.append((clock.monotonic(), tokens))
        self._sum += tokens
        return answer

    def check(self) -> None:
        """Raises ApiError (429)."""
        now = clock.monotonic()
        while self._spent and self._spent[0][0] <= now - HOUR_S:
            self._sum -= self._spent.popleft()[1]
        if self._sum >= self._most:
            wait_s = int(self._spent[0][0] + HOUR_S - now) + 1 if self._spent else int(HOUR_S)
            message = f"the graders of this key may spend {self._most} tokens an hour on models"
            raise ApiError(429, message, headers={"retry-after": str(wait_s)})

    async def close(self) -> None:
        """As the protocol says; the judge is closed by its owner."""


class Allowances:
    """The allowances of all client keys."""

    def __init__(self, judge: JudgeModelClient, settings: JudgeSettings) -> None:
        self._judge, self._settings = judge, settings
        self._of_key: dict[str, KeyAllowance] = {}

    def of(self, key: str, grader: AnyGrader) -> JudgeModelClient:
        """What asks models for the grader. Raises ApiError: 403 for a model that clients may not ask, 429 if
        the key's tokens of the hour are spent."""
        found = self._of_key.setdefault(key, KeyAllowance(self._judge, self._settings.client_tokens_per_hour))
        asked = [
            each.model
            for each in every_grader(grader)
            if isinstance(each, ScoreModelGrader | LabelModelGrader)
        ]
        if refused := [model for model in asked if model not in self._settings.client_models]:
            message = (
                f"grader.model: {refused[0]!r} needs an admin key, or a place in rewards.judge.client_models"
            )
            raise ApiError(403, message, param="grader.model")
        if asked:
            found.check()
        return found
