"""Ids in, ids out: one generation on one SGLang engine, streamed through its `/generate`.

The engine streams either what is new in each event or everything so far; both arrive here as what is new.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import msgspec

from rollout_queue.records import Span
from rollout_queue.web.errors import ApiError

logger = logging.getLogger(__name__)

LINE_LIMIT_BYTES = 64 * 2**20
"""One event of a cumulative stream repeats the whole answer, so lines grow with it."""


@dataclass(frozen=True)
class EngineRequest:
    """What the engine is asked: `rid` names the generation, for abort; parameters in SGLang's names."""

    rid: str
    input_ids: list[int]
    parameters: dict[str, Any]
    stream_interval: int
    """Tokens per event: 1 for a client that streams, more for one that waits for the whole answer."""
    top_logprobs: int = 0


@dataclass(frozen=True)
class Piece:
    """What one event of the stream added."""

    ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[float, int]]]
    """Per token, the likeliest alternatives as (logprob, id); empty unless asked for."""
    finish: str | None = None
    """`stop`, `length` or `abort`, in the last piece only."""
    matched: str | None = None
    """The stop string that ended the answer, where one did."""
    versions: tuple[Span, ...] = ()
    """Who sampled what, over the whole output; in the last piece only."""


class _Reason(msgspec.Struct):
    type: Literal["stop", "length", "abort"]
    matched: Any = None
    """The stop string or the stop id that ended the answer."""


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    finish_reason: _Reason | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    output_top_logprobs: list[list[tuple[float, int, str | None]] | None] | None = None
    weight_version: str = "0"
    weight_versions: list[_VersionSpan] = []


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: dict[str, Any] | str | None = None


_event_decoder = msgspec.json.Decoder(_Event)
_encoder = msgspec.json.Encoder()


class EngineClient:
    """Speaks to every engine of the fleet over one connection pool."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=timeout_s)
        # SGLang closes idle connections after 5 s; ours go first, so that no request meets a closed one.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
        self._session = aiohttp.ClientSession(connector=connector, read_bufsize=LINE_LIMIT_BYTES)

    async def close(self) -> None:
        await self._session.close()

    async def generate(self, engine_url: str, request: EngineRequest) -> AsyncGenerator[Piece, None]:
        """Sample one answer.

        Raises ApiError: 400 where the request is at fault, 503 or 504 where the engine is.
        """
        body = {
            "rid": request.rid,
            "input_ids": request.input_ids,
            "sampling_params": {**request.parameters, "stream_interval": request.stream_interval},
            "return_logprob": True,
            "top_logprobs_num": request.top_logprobs,
            "stream": True,
        }
        headers = {"content-type": "application/json"}
        try:
            async with self._session.post(
                f"{engine_url}/generate", data=_encoder.encode(body), headers=headers, timeout=self._timeout
            ) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.read())
                async for piece in _pieces(response.content):
                    yield piece
        except TimeoutError as error:
            raise ApiError(504, "the engine did not answer in time") from error
        except (aiohttp.ClientError, OSError, msgspec.DecodeError, ValueError) as error:
            # A ValueError is an event that is longer than LINE_LIMIT_BYTES.
            raise ApiError(503, f"the engine failed: {type(error).__name__}") from error

    async def abort(self, engine_url: str, rid: str) -> None:
        """Ask the engine to stop a generation. Best effort: it also notices the closed connection."""
        try:
            async with self._session.post(
                f"{engine_url}/abort_request", json={"rid": rid}, timeout=aiohttp.ClientTimeout(total=5)
            ):
                pass
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("generation %s is not aborted: %s", rid, error)

    async def get_json(self, url: str, timeout_s: float, headers: dict[str, str] | None = None) -> Any:
        """GET of a control path. Raises aiohttp.ClientError or TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.get(url, timeout=timeout, headers=headers) as response:
            response.raise_for_status()
            return await response.json(content_type=None)

    async def post_json(
        self, url: str, body: Any, timeout_s: float, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """POST to a control path: its status and JSON. Raises aiohttp.ClientError or TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.post(url, json=body, timeout=timeout, headers=headers) as response:
            return response.status, await response.json(content_type=None)


async def _pieces(stream: aiohttp.StreamReader) -> AsyncGenerator[Piece, None]:
    have = 0
    async for line in stream:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = _event_decoder.decode(line[6:])
        if event.error is not None:
            raise _refusal(_code_of(event.error), line[6:])
        piece = _new_in(event, have)
        have += len(piece.ids)
        yield piece
        if piece.finish is not None:
            return
    raise ApiError(503, "the engine ended its answer without saying why")


def _new_in(event: _Event, have: int) -> Piece:
    """The tokens beyond the first `have`, whichever way the engine streams."""
    meta = event.meta_info
    fresh = meta.completion_tokens - have
    ids = event.output_ids[-fresh:] if fresh > 0 else []
    logprobs = meta.output_token_logprobs[-fresh:] if fresh > 0 else []
    if len(ids) != fresh or [token for _, token, _ in logprobs] != ids:
        raise ApiError(503, "the engine's ids and logprobs do not belong together")
    tops = (meta.output_top_logprobs or [])[-fresh:] if fresh > 0 else []
    reason = meta.finish_reason
    return Piece(
        ids=ids,
        logprobs=[logprob for logprob, _, _ in logprobs],
        top_logprobs=[[(logprob, token) for logprob, token, _ in top or ()] for top in tops],
        finish=reason.type if reason else None,
        matched=reason.matched if reason and isinstance(reason.matched, str) else None,
        versions=_spans(meta) if reason else (),
    )


def _spans(meta: _Meta) -> tuple[Span, ...]:
    """Version spans over the output; an engine before 0.5.20 knows only the version at the end."""
    total = meta.completion_tokens
    if not meta.weight_versions:
        return (Span(version_number(meta.weight_version), 0, total),) if total else ()
    spans = (
        Span(version_number(span.version), span.start, min(span.end, total)) for span in meta.weight_versions
    )
    return tuple(span for span in spans if span.end > span.start)


def version_number(label: str) -> int:
    """An engine that nobody gave a version says `default`: that is version 0."""
    return int(label) if label.isascii() and label.isdigit() else 0


def _code_of(error: dict[str, Any] | str) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 503


def _refusal(status: int, body: bytes) -> ApiError:
    """SGLang has five shapes of error; all become ours."""
    message = body.decode(errors="replace")
    with suppress(msgspec.DecodeError):  # plain text is a message as well
        parsed = msgspec.json.decode(body)
        error = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
        message = str(error.get("message", error) if isinstance(error, dict) else error)
    if status == 400:
        code = "context_length_exceeded" if "context length" in message else None
        return ApiError(400, f"the engine refused the request: {message}", code=code)
    return ApiError(503, f"the engine failed with {status}: {message[:500]}")


async def drain(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and await their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
