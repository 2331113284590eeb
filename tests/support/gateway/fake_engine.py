"""A small stand-in for SGLang's HTTP API in tests."""

import asyncio
import base64
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from tests.support.images import opened


@dataclass(frozen=True)
class Interruption:
    """An answer that ends early: after `after` tokens, in the way that `words` names."""

    after: int
    words: Literal["reset", "abort"] | dict[str, Any]
    """`reset` breaks the connection, `abort` sends SGLang's abort event, a dictionary is sent as an event."""


class Dead(Exception):
    """Makes the server cut the connection in the middle of an answer."""


@dataclass(eq=False)
class FakeEngine:
    """Answers with scripted text or ids, followed by `end`, and keeps each request.

    When the prompt already ends with the beginning of the answer, it sends the rest, as a greedy model would.
    """

    tokenizer: Tokenizer
    script: deque[str | list[int]] = field(default_factory=deque)
    requests: list[dict[str, Any]] = field(default_factory=list)
    traceparents: list[str | None] = field(default_factory=list)
    """The header of each request."""
    aborted: list[str] = field(default_factory=list)
    refusals: deque[Response | None] = field(default_factory=deque)
    """The responses to the next requests; None stands for an answer."""
    version: str = "0"
    cached_tokens: int | None = 0
    spans: list[dict[str, Any]] | None = None
    cumulative: bool = False
    has_tokenizer: bool = True
    """If False, it refuses stop strings as SGLang does with `--skip-tokenizer-init`."""
    stop_after: int | None = None
    """After this many tokens the stream ends without its last event, as when an engine dies."""
    stall_after: int | None = None
    """After this many tokens the engine sends nothing more; with 0 it sends nothing at all."""
    stalled: bool = False
    candidates_off_by: int = 0
    """By how much the ids differ whose scores it tells from those that were asked for."""
    interruptions: deque["Interruption | None"] = field(default_factory=deque)
    """How each of the next answers ends early; one entry for each request."""
    end: str = "<|im_end|>"
    """The token that ends every answer."""
    mind: str | list[int] = "hello"
    """The answer once the script is used up."""
    pace_s: float = 0.0
    """How long each event takes."""
    raw: bytes | None = None
    """The bytes of the next answer; then the connection breaks."""
    received: Callable[[], int] = lambda: 2**32
    """Returns how many tokens the client has received. An interruption waits for those sent before it."""
    expert_of: Callable[[int], int] | None = None
    """The expert that the token at a position passes through. None: it does not tell."""
    last_words: dict[str, Any] = field(default_factory=dict)
    miscounted: int = 0
    """So many tokens more than the prompt has are reported."""
    """Fields that replace those of the last event's `meta_info`."""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/generate", self.generate, methods=["POST"]),
                Route("/model_info", self.model_info),
                Route("/abort_request", self.abort, methods=["POST"]),
            ]
        )

    async def model_info(self, _: Request) -> Response:
        return JSONResponse({"weight_version": self.version})

    async def abort(self, request: Request) -> Response:
        self.aborted.append((await request.json())["rid"])
        return PlainTextResponse("")

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.traceparents.append(request.headers.get("traceparent"))
        if self.refusals and (refusal := self.refusals.popleft()) is not None:
            return refusal
        if not self.has_tokenizer and "stop" in body["sampling_params"]:
            stop = body["sampling_params"]["stop"]
            message = f"stop={stop!r} is unavailable when skip_tokenizer_init=True (requires tokenizer)."
            error = {"error": {"message": message, "type": "BadRequestError", "code": 400}}
            return PlainTextResponse(f"data: {json.dumps(error)}\n\n", media_type="text/event-stream")
        if self.raw is not None:
            raw, self.raw = self.raw, None
            return StreamingResponse(self._cut_off(raw), media_type="text/event-stream")
        if not body.get("stream", True):
            return JSONResponse({"meta_info": scores_of(body, self.candidates_off_by)})
        answer = self.script.popleft() if self.script else self.mind
        ids = self.tokenizer.encode(answer).ids if isinstance(answer, str) else list(answer)
        ids += self.tokenizer.encode(self.end).ids
        said = said_already(body["input_ids"], ids)
        interruption = self.interruptions.popleft() if self.interruptions else None
        events = self._events(body, ids[said:], said, interruption)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(
        self, body: dict[str, Any], ids: list[int], said: int, interruption: Interruption | None
    ) -> AsyncIterator[bytes]:
        limit = body["sampling_params"]["max_new_tokens"]
        interval = body["sampling_params"]["stream_interval"]
        reason = {"type": "stop", "matched": ids[-1]}
        for stop in body["sampling_params"].get("stop", []):
            ends = (n for n in range(1, len(ids) + 1) if stop in self.tokenizer.decode(ids[:n]))
            end = next(ends, None)
            if end is not None:
                ids, reason = ids[:end], {"type": "stop", "matched": stop}
        if len(ids) > limit:
            ids, reason = ids[:limit], {"type": "length", "length": limit}
        logprobs = [logprob_of(said + index) for index in range(len(ids))]
        if self.stall_after == 0:
            await self._stall()
        if interruption is not None and interruption.after == 0:
            yield self._last_words(interruption, 0, ids)
            return
        for end in [*range(interval, len(ids), interval), len(ids)]:
            await asyncio.sleep(self.pace_s)  # the time that a token takes
            start = (
                0
                if self.cumulative
                else max(0, end - interval if end % interval == 0 else end - end % interval)
            )
            meta: dict[str, Any] = {
                "completion_tokens": end,
                "cached_tokens": self.cached_tokens,
                "finish_reason": None,
                "weight_version": self.version,
                "prompt_tokens": len(body["input_ids"])
                + pads_of(body.get("image_data", ()))
                + self.miscounted,
                "output_token_logprobs": [[logprobs[index], ids[index], None] for index in range(start, end)],
            }
            if tops := body["top_logprobs_num"]:
                meta["output_top_logprobs"] = [
                    [[-0.1 - rank, max(0, ids[index] - rank), None] for rank in range(tops)]
                    for index in range(start, end)
                ]
            if end == len(ids):
                meta["finish_reason"] = reason
                meta["weight_versions"] = self.spans or [
                    {"version": self.version, "start": 0, "end": len(ids)}
                ]
                if body.get("return_routed_experts") and self.expert_of is not None:
                    meta |= self._experts(body, len(ids))
                meta |= self.last_words
            event = {"output_ids": ids[start:end], "meta_info": meta}
            yield f"data: {json.dumps(event)}\n\n".encode()
            if interruption is not None and end >= interruption.after:
                await self._arrival_of(said + end)
                yield self._last_words(interruption, end, ids)
                return
            if self.stop_after is not None and end >= self.stop_after:
                return
            if self.stall_after is not None and end >= self.stall_after:
                await self._stall()
        yield b"data: [DONE]\n\n"

    def _experts(self, body: dict[str, Any], sampled: int) -> dict[str, Any]:
        """SGLang's record: no expert for the last token, because it passed through none."""
        assert self.expert_of is not None
        prompt = len(body["input_ids"])
        told = map(self.expert_of, range(body["routed_experts_start_len"], prompt + sampled - 1))
        packed = b"".join(expert.to_bytes(4, "little", signed=True) for expert in told)
        return {"prompt_tokens": prompt, "routed_experts": base64.b64encode(packed).decode()}

    def _last_words(self, interruption: Interruption, end: int, ids: list[int]) -> bytes:
        if interruption.words == "reset":
            raise Dead
        event: Any = interruption.words
        if event == "abort":
            meta = {
                "completion_tokens": end,
                "finish_reason": {
                    "type": "abort",
                    "message": "Aborted",
                    "status_code": None,
                    "err_type": None,
                },
                "weight_version": self.version,
                "weight_versions": self.spans or [{"version": self.version, "start": 0, "end": end}],
                "output_token_logprobs": [[logprob_of(end - 1), ids[end - 1], None]] if end else [],
            }
            # In incremental streaming, SGLang's abort event repeats the last token.
            event = {"output_ids": ids[:end][-1:], "meta_info": meta}
        return f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()

    async def _arrival_of(self, tokens: int) -> None:
        """Wait until the client has received the tokens, or for a second: the gateway may hold some back."""
        await asyncio.sleep(0.01)  # lets the tokens arrive if the test sets no `received`
        for _ in range(200):
            if self.received() >= tokens:
                return
            await asyncio.sleep(0.005)  # the client reads in another thread or process

    async def _cut_off(self, raw: bytes) -> AsyncIterator[bytes]:
        yield raw
        await asyncio.sleep(0.01)  # lets the bytes arrive before the connection breaks
        raise Dead

    async def _stall(self) -> None:
        self.stalled = True
        await asyncio.sleep(60)  # until the call is cancelled


def logprob_of(index: int) -> float:
    """The logprob of the fake's token at `index`; exact in float32."""
    return -(1 + index % 97) / 128


def pads_of(images: Sequence[str], side: int = 32) -> int:
    """How many more tokens than pads the images have; each square of `side` pixels is one."""
    sizes = [opened(image).size for image in images]
    return sum(width // side * (height // side) - 1 for width, height in sizes)


def scores_of(body: dict[str, Any], off_by: int = 0) -> dict[str, Any]:
    """SGLang's scores of a prompt: token 7 has -0.007 anywhere, and the likeliest tokens are 0, 1, …"""
    start, top_k = body["logprob_start_len"], body.get("top_logprobs_num", 0)
    ids = body["input_ids"][start:]
    meta: dict[str, Any] = {
        "input_token_logprobs": [
            [-token / 1000 if at else None, token, None] for at, token in enumerate(ids)
        ],
        "cached_tokens": 0,
    }
    if top_k:
        top = [[-0.5 - rank, rank, None] for rank in range(top_k)]
        meta["input_top_logprobs"] = [top if at else None for at in range(len(ids))]
    if candidates := body.get("token_ids_logprob"):
        found = [[-token / 1000, token + off_by, None] for token in candidates]
        meta["input_token_ids_logprobs"] = [found if at else None for at in range(len(ids))]
    return meta


def said_already(prompt: list[int], ids: list[int]) -> int:
    """The length of the longest beginning of `ids` with which the prompt ends.

    The algorithm is that of Knuth, Morris and Pratt, so that long answers take linear time.
    """
    ids, prompt = ids[: len(prompt)], prompt[-len(ids) :]
    # shorter[n - 1]: the length of the longest other beginning of `ids` with which its first n ids end.
    shorter, said = [0], 0
    for each in ids[1:]:
        while said and ids[said] != each:
            said = shorter[said - 1]
        said += ids[said] == each
        shorter.append(said)
    said = 0
    for each in prompt:
        while said and (said == len(ids) or ids[said] != each):
            said = shorter[said - 1]
        said += said < len(ids) and ids[said] == each
    return said
