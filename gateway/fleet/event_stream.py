"""Decodes the events of an engine's `/generate`. An event has the whole answer so far, or only new tokens.

bytes of one read ──▶ events ──▶ what each event adds ──▶ one chunk
"""

import logging
from contextlib import suppress
from typing import Any, Literal

import msgspec
from msgspec import structs

from gateway.errors import EngineFault, RequestRefused
from rollout_queue.contract.records import RoutedExperts, Span
from rollout_queue.foreign_json import read_json

logger = logging.getLogger(__name__)

EVENT_LIMIT_BYTES = 64 * 2**20
"""The longest event that is accepted. A cumulative event repeats the whole answer, so events grow with it."""
EXPERTS_EVENT_LIMIT_BYTES = 256 * 2**20
"""The same if the last event has experts: 5.4 bytes for each expert of each layer and token, so those of
130,000 tokens in 48 layers of 8 experts."""
LOWEST_LOGPROB = -3.4028234e38
"""Records store float32, in which a lower value would be infinite."""


class OutputChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that one read of the stream added, from one event or from many."""

    ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[float, int]]] = []
    """For each token the likeliest alternatives as (logprob, id); empty unless requested."""
    version: int = 0
    """The policy version that the engine served when it sent the tokens."""
    server: str = ""
    """The id of the server that sampled the tokens."""
    cached_tokens: int = 0
    """How many tokens of its prompt the server had in its cache."""
    prompt_tokens: int = 0
    """How many tokens the server made of the prompt; 0 if it has not said so."""
    finish: str | None = None
    """`stop`, `length` or `abort`, in the last chunk only."""
    matched: str | None = None
    """The stop string that ended the answer, if one did."""
    end_id: int | None = None
    """The token that ended the answer, if one did; it is no text."""
    versions: tuple[Span, ...] = ()
    """Which version sampled which part of the whole output; in the last chunk only."""
    experts: RoutedExperts | None = None
    """The experts of the tokens that were asked for; in the last chunk only."""

    @property
    def text_ids(self) -> list[int]:
        """The tokens of the answer's text."""
        return self.ids[:-1] if self.ids and self.ids[-1] == self.end_id else self.ids


class _Reason(msgspec.Struct):
    type: Literal["stop", "length", "abort"]
    matched: Any = None
    """The stop string or the stop id that ended the answer."""
    message: str | None = None
    status_code: int | None = None


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    cached_tokens: int | None = 0
    finish_reason: _Reason | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    output_top_logprobs: list[list[tuple[float, int, str | None]] | None] | None = None
    weight_version: str = "0"
    weight_versions: list[_VersionSpan] = []
    prompt_tokens: int = 0
    routed_experts: bytes | None = None
    """int32, little-endian, in base64: of each token from the requested one on, without the last token."""


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    """None in an error."""


_decode = msgspec.json.Decoder(_Event).decode


class EventStream:
    """Decodes one answer from the bytes as they arrive."""

    def __init__(self, server: str = "", version: int | None = None, experts_from: int | None = None) -> None:
        """`version`: that of the adapter that answers; without one, the engine tells the version.
        `experts_from`: the position of the first token whose experts were requested."""
        self._experts_from = experts_from
        self._limit_bytes = EVENT_LIMIT_BYTES if experts_from is None else EXPERTS_EVENT_LIMIT_BYTES
        self._server = server
        self._adapter = version
        self._incomplete = bytearray()
        """The beginning of an event whose end has not arrived yet."""
        self._have = 0
        """Output tokens so far."""
        self._version = "0"
        self._number = version or 0
        self._cached = 0
        self._prompt = 0
        self.finished = False

    def feed(self, data: bytes) -> list[OutputChunk]:
        """The tokens that `data` adds, in one chunk for each policy version.

        Raises EngineFault; RequestRefused if the engine finds the request at fault.
        """
        if self._incomplete or not data.endswith(b"\n\n"):
            data = self._whole(data)
        try:
            return self._chunks(data.split(b"\n\n"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineFault("nonsense", f"the engine's event cannot be read: {error}") from error

    def _whole(self, data: bytes) -> bytes:
        """The events that are whole with `data`. The beginning of the next one is kept."""
        seen = max(0, len(self._incomplete) - 1)  # the last byte may be the first of the two that end it
        self._incomplete += data
        end = self._incomplete.rfind(b"\n\n", seen)
        if end < 0:
            if len(self._incomplete) > self._limit_bytes:
                raise EngineFault("nonsense", f"one event is longer than {self._limit_bytes} bytes")
            return b""
        whole = bytes(self._incomplete[:end])
        del self._incomplete[: end + 2]
        return whole

    def _chunks(self, events: list[bytes]) -> list[OutputChunk]:
        chunks: list[OutputChunk] = []
        ids: list[int] = []
        triples: list[tuple[float, int, str | None]] = []
        tops: list[list[tuple[float, int, str | None]] | None] = []
        meta: _Meta | None = None
        for data in events:
            if not data.startswith(b"data: {"):
                continue  # [DONE], or a comment
            event = _decode(data[6:])
            meta = event.meta_info
            if meta is None:
                raise engine_error(200, data[6:])
            reason = meta.finish_reason
            if reason is not None and reason.status_code == 400:
                # The grammar did not compile. The event has one random id, which was not sampled.
                raise _error(400, reason.message or "refused")
            if meta.weight_version != self._version:
                if ids:
                    chunks.append(self._chunk(ids, triples, tops, meta))
                    ids, triples, tops = [], [], []
                self._version = meta.weight_version
                if self._adapter is None:
                    self._number = version_number(meta.weight_version)
            given, logprobs = event.output_ids, meta.output_token_logprobs
            fresh = meta.completion_tokens - self._have
            if fresh == len(given) == len(logprobs):
                ids += given
                triples += logprobs
            elif fresh:  # a cumulative event
                ids += given[-fresh:]
                triples += logprobs[-fresh:]
                if not 0 < fresh <= len(given):
                    raise EngineFault("nonsense", "the engine miscounts its tokens")
            # An event that adds no token may repeat the last id: an abort does so.
            if meta.output_top_logprobs and fresh > 0:
                tops += meta.output_top_logprobs[-fresh:]
            self._have = meta.completion_tokens
            if reason is not None:
                self.finished = True
                chunks.append(self._last_chunk(self._chunk(ids, triples, tops, meta), meta, reason))
                return chunks
        if meta is not None and ids:
            chunks.append(self._chunk(ids, triples, tops, meta))
        return chunks

    def _chunk(
        self,
        ids: list[int],
        triples: list[tuple[float, int, str | None]],
        tops: list[list[tuple[float, int, str | None]] | None],
        meta: _Meta,
    ) -> OutputChunk:
        self._cached = meta.cached_tokens or self._cached
        self._prompt = meta.prompt_tokens or self._prompt
        logprobs = [logprob for logprob, _, _ in triples]
        if [token for _, token, _ in triples] != ids or min(logprobs, default=0.0) < LOWEST_LOGPROB:
            raise EngineFault("nonsense", "the engine's ids and logprobs do not belong together")
        return OutputChunk(
            ids=ids,
            logprobs=logprobs,
            top_logprobs=[[(logprob, token) for logprob, token, _ in top or ()] for top in tops],
            version=self._number,
            server=self._server,
            cached_tokens=self._cached,
            prompt_tokens=self._prompt,
        )

    def _last_chunk(self, chunk: OutputChunk, meta: _Meta, reason: _Reason) -> OutputChunk:
        """The chunk with the reason why the answer ended."""
        if reason.type == "abort" and reason.status_code is not None and not self._have:
            raise _error(reason.status_code, reason.message or "aborted")
        return structs.replace(
            chunk,
            finish=reason.type,
            matched=reason.matched if isinstance(reason.matched, str) else None,
            end_id=reason.matched if isinstance(reason.matched, int) else None,
            versions=self._spans(meta),
            experts=self._experts(meta),
            prompt_tokens=meta.prompt_tokens,
        )

    def _experts(self, meta: _Meta) -> RoutedExperts | None:
        """The experts that the engine reports. The answer is good without them."""
        if self._experts_from is None or meta.routed_experts is None:
            return None
        try:
            rows = meta.prompt_tokens + self._have - 1 - self._experts_from
            return RoutedExperts.of_int32(meta.routed_experts, rows)
        except ValueError as error:
            logger.warning("engine %s reports experts that are not recorded: %s", self._server, error)
            return None

    def _spans(self, meta: _Meta) -> tuple[Span, ...]:
        """The version spans of the output.

        An adapter is one version: the rollout server ends its requests before it loads other weights. SGLang
        before 0.5.20 reports no spans: all tokens then count for the last event's version.
        """
        total = self._have
        if self._adapter is not None or not meta.weight_versions:
            return (Span(self._number, 0, total),) if total else ()
        spans = (
            Span(version_number(span.version), span.start, min(span.end, total))
            for span in meta.weight_versions
        )
        return tuple(span for span in spans if span.end > span.start)


def version_number(label: str) -> int:
    """The number in an engine's `weight_version`. 0 for other texts: `default` means that none was set."""
    return int(label) if label.isascii() and label.isdigit() else 0


TOO_LONG = ("context length", "Input length")
"""What SGLang's refusals say of a prompt that is too long: its tokenizer's, and its scheduler's, which keeps
a few tokens of the context free."""


def engine_error(status: int, body: bytes) -> EngineFault | RequestRefused:
    """The error that SGLang's response reports. SGLang has six shapes of error, one with status 200."""
    error: Any = body.decode(errors="replace")
    with suppress(msgspec.DecodeError):  # the body may be plain text
        error = read_json(body)
    if isinstance(error, dict):
        error = error.get("error", error)
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return _error(code if status == 200 and isinstance(code, int) else status, str(error))


def _error(status: int, message: str) -> EngineFault | RequestRefused:
    """The error for a status: only 400 means that the request is at fault."""
    if status == 400:
        code = "context_length_exceeded" if any(each in message for each in TOO_LONG) else None
        return RequestRefused(f"the engine refused the request: {message[:2000]}", code=code)
    return EngineFault(
        "busy" if status == 503 else "failed", f"the engine failed with {status}: {message[:500]}"
    )
