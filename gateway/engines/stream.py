"""What an engine's `/generate` streams, made into pieces: event by event, whichever way it streams them.

bytes of one read ──▶ events ──▶ what each adds ──▶ one piece
"""

from contextlib import suppress
from typing import Any, Literal

import msgspec

from gateway.errors import EngineFault, RequestRefused
from rollout_queue.contract.records import Span

EVENT_LIMIT_BYTES = 64 * 2**20
"""One event of a cumulative stream repeats the whole answer, so events grow with it."""
LOWEST_LOGPROB = -3.4028234e38
"""Records keep float32: what lies below would be infinite there."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one read of the stream added: the tokens of one event or of many."""

    ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[float, int]]] = []
    """Per token, the likeliest alternatives as (logprob, id); empty unless asked for."""
    version: int = 0
    """What the engine served when it sent this."""
    server: str = ""
    """Who sampled it."""
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
    message: str | None = None
    status_code: int | None = None


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
    meta_info: _Meta | None = None
    """Not there in an error."""


_decode = msgspec.json.Decoder(_Event).decode


class EventStream:
    """The tokens of one answer, put together from the bytes as they arrive."""

    def __init__(self, server: str = "") -> None:
        self._server = server
        self._rest = b""
        self._have = 0
        self._version = "0"
        self._number = 0
        self.finished = False

    def feed(self, data: bytes) -> list[Piece]:
        """What `data` adds: at most one piece for each policy version in it.

        Raises EngineFault, or RequestRefused where the engine finds the request at fault.
        """
        data = self._rest + data if self._rest else data
        end = data.rfind(b"\n\n")
        if end < 0:
            if len(data) > EVENT_LIMIT_BYTES:
                raise EngineFault("nonsense", f"one event is longer than {EVENT_LIMIT_BYTES} bytes")
            self._rest = data
            return []
        self._rest = data[end + 2 :]
        try:
            return self._pieces(data[:end].split(b"\n\n"))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineFault("nonsense", f"the engine's event cannot be read: {error}") from error

    def _pieces(self, lines: list[bytes]) -> list[Piece]:
        pieces: list[Piece] = []
        ids: list[int] = []
        triples: list[tuple[float, int, str | None]] = []
        tops: list[list[tuple[float, int, str | None]] | None] = []
        for line in lines:
            if not line.startswith(b"data: {"):
                continue  # [DONE], or a comment
            event = _decode(line[6:])
            meta = event.meta_info
            if meta is None:
                raise refusal(200, line[6:])
            reason = meta.finish_reason
            if reason is not None and reason.status_code == 400:
                # A grammar that does not compile ends so, with one random id that nothing sampled.
                raise _fault(400, reason.message or "refused")
            if meta.weight_version != self._version:
                if ids:
                    pieces.append(self._piece(ids, triples, tops))
                    ids, triples, tops = [], [], []
                self._version = meta.weight_version
                self._number = version_number(meta.weight_version)
            fresh = meta.completion_tokens - self._have
            if fresh == len(event.output_ids) == len(meta.output_token_logprobs):
                ids += event.output_ids
                triples += meta.output_token_logprobs
            elif fresh:  # everything so far
                ids += event.output_ids[-fresh:]
                triples += meta.output_token_logprobs[-fresh:]
                if not 0 < fresh <= len(event.output_ids):
                    raise EngineFault("nonsense", "the engine miscounts its tokens")
            # Where nothing is fresh, the last id is sent again: an abort does so.
            if meta.output_top_logprobs and fresh > 0:
                tops += meta.output_top_logprobs[-fresh:]
            self._have += fresh
            if reason is not None:
                self.finished = True
                pieces.append(self._piece(ids, triples, tops, **self._ending(meta, reason)))
                return pieces
        if ids:
            pieces.append(self._piece(ids, triples, tops))
        return pieces

    def _piece(
        self,
        ids: list[int],
        triples: list[tuple[float, int, str | None]],
        tops: list[list[tuple[float, int, str | None]] | None],
        **ending: Any,
    ) -> Piece:
        logprobs, tokens, _ = zip(*triples, strict=True) if triples else ((), (), ())
        if list(tokens) != ids or min(logprobs, default=0.0) < LOWEST_LOGPROB:
            raise EngineFault("nonsense", "the engine's ids and logprobs do not belong together")
        return Piece(
            ids=ids,
            logprobs=list(logprobs),
            top_logprobs=[[(logprob, token) for logprob, token, _ in top or ()] for top in tops],
            version=self._number,
            server=self._server,
            **ending,
        )

    def _ending(self, meta: _Meta, reason: _Reason) -> dict[str, Any]:
        """What the last piece says beside its tokens."""
        if reason.type == "abort" and reason.status_code is not None and not self._have:
            raise _fault(reason.status_code, reason.message or "aborted")
        return {
            "finish": reason.type,
            "matched": reason.matched if isinstance(reason.matched, str) else None,
            "versions": self._spans(meta),
        }

    def _spans(self, meta: _Meta) -> tuple[Span, ...]:
        """Version spans over the output; an engine before 0.5.20 knows only the version at the end."""
        total = self._have
        if not meta.weight_versions:
            return (Span(self._number, 0, total),) if total else ()
        spans = (
            Span(version_number(span.version), span.start, min(span.end, total))
            for span in meta.weight_versions
        )
        return tuple(span for span in spans if span.end > span.start)


def version_number(label: str) -> int:
    """An engine that nobody gave a version says `default`: that is version 0."""
    return int(label) if label.isascii() and label.isdigit() else 0


def refusal(status: int, body: bytes) -> EngineFault | RequestRefused:
    """SGLang has six shapes of error, one of them inside a 200; all become ours."""
    error: Any = body.decode(errors="replace")
    with suppress(msgspec.DecodeError):  # plain text is a message as well
        error = msgspec.json.decode(body)
    if isinstance(error, dict):
        error = error.get("error", error)
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return _fault(code if status == 200 and isinstance(code, int) else status, str(error))


def _fault(status: int, message: str) -> EngineFault | RequestRefused:
    """Only a 400 is the request's own fault."""
    if status == 400:
        code = "context_length_exceeded" if "context length" in message else None
        return RequestRefused(f"the engine refused the request: {message[:2000]}", code=code)
    return EngineFault(
        "busy" if status == 503 else "failed", f"the engine failed with {status}: {message[:500]}"
    )
