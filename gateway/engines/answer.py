"""An answer in the making, across the engines that have a part in it.

piece of an engine ──▶ checked ──▶ handed on, or held back ──▶ last piece: whose tokens, which versions
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from msgspec import structs

from gateway.engines.engine import EngineRequest
from gateway.engines.stream import Piece
from gateway.errors import EngineFault
from rollout_queue.contract.records import Span

GRAMMARS = frozenset({"json_schema", "regex", "ebnf", "structural_tag"})
"""Parameters that constrain an answer from its first token: an engine cannot enter one in the middle."""


class SampleRequest(msgspec.Struct, frozen=True):
    """What is to be sampled; parameters in SGLang's names."""

    rid: str
    session_id: str
    version: int | None
    """Only this policy version may answer."""
    input_ids: list[int]
    parameters: dict[str, Any]
    stream_interval: int
    """Tokens per event: 1 for a client that streams, more for one that waits for the whole answer."""
    top_logprobs: int = 0


class PartialAnswer:
    """The tokens so far, who sampled them, and what is left to ask for."""

    def __init__(self, wanted: SampleRequest, text_of: Callable[[list[int]], str], vocab_size: int) -> None:
        self.ids: list[int] = []
        self.rid = wanted.rid
        self.finished = False
        self.cut = False
        """It ended before its engine did."""
        self._wanted = wanted
        self._text_of = text_of
        self._vocab_size = vocab_size
        self._attempts = 0
        self._start = 0
        """Where the part of the engine that samples now begins."""
        self._spans: list[Span] = []
        self._held: list[Piece] = []
        self._handed_on = 0
        self._version: int | None = None
        """What the current engine said last that it serves."""
        self._constrained = not GRAMMARS.isdisjoint(wanted.parameters)
        stop = wanted.parameters.get("stop") or []
        self._stops: list[str] = [stop] if isinstance(stop, str) else stop
        self._reach = max((len(stop.encode()) + 3 for stop in self._stops), default=0)
        """More tokens than any stop string has: each is at least a byte of text."""

    def request(self, server_id: str) -> EngineRequest:
        """What the next engine is asked: to go on where the last one ended."""
        have = len(self.ids)
        self.rid = f"{self._wanted.rid}.{self._attempts}" if self._attempts else self._wanted.rid
        self._attempts += 1
        self._start, self._version = have, None
        return EngineRequest(
            rid=self.rid,
            input_ids=[*self._wanted.input_ids, *self.ids] if have else self._wanted.input_ids,
            parameters=self._remaining(have),
            stream_interval=self._wanted.stream_interval,
            top_logprobs=self._wanted.top_logprobs,
            server=server_id,
        )

    def take(self, piece: Piece) -> Iterator[Piece]:
        """The pieces that may be handed on now that `piece` is here; the last one is the answer's.

        Raises EngineFault for what cannot be true, and, after its tokens, where the engine gives up.
        """
        self._check(piece)
        if (ending := self._stop_across_the_seam(piece.ids)) is not None:
            self.cut = piece.finish is None
            piece = _first(piece, *ending)
        self._attribute(piece)
        unsure = self._is_unsure(piece)
        self.ids += piece.ids
        self.finished = piece.finish in ("stop", "length")
        if self.finished:
            yield from self._released()
            yield structs.replace(piece, versions=self._versions())
        elif piece.finish == "abort":
            if not self._constrained:
                yield from self._released()
                yield from self._handed(structs.replace(piece, finish=None, versions=()))
            raise EngineFault("aborted", "the engine aborted the answer")
        elif unsure or self._held:
            self._held.append(piece)
        else:
            yield from self._handed(piece)

    def settle(self) -> Piece | None:
        """After a fault: keep what was handed on. The last piece, where nothing is left to sample."""
        self._held.clear()
        del self.ids[self._handed_on :]
        self._spans = _until(self._spans, len(self.ids))
        finish, matched = self._ending()
        if finish is None:
            return None
        self.finished = True
        versions = self._versions()
        server = self._spans[-1].engine or ""
        return Piece(ids=[], logprobs=[], server=server, finish=finish, matched=matched, versions=versions)

    def may_go_on(self, fault: EngineFault) -> None:
        """Raises the fault where no engine could take over."""
        if self.ids and self._constrained:
            raise fault

    def _remaining(self, have: int) -> dict[str, Any]:
        """Parameters of the part that is missing.

        A seed stays as it is: engines draw by the seed and the token's position, so another one continues
        the same series. Frequency and presence penalties count an engine's own output only: they start
        afresh at the seam.
        """
        parameters = dict(self._wanted.parameters)
        if parameters.get("max_new_tokens") is not None:
            parameters["max_new_tokens"] -= have
        if parameters.get("min_new_tokens"):
            parameters["min_new_tokens"] = max(0, parameters["min_new_tokens"] - have)
        return parameters

    def _ending(self) -> tuple[str | None, str | None]:
        """Why the tokens so far are the whole answer, if they are: `finish` and the stop string."""
        parameters, limit = self._wanted.parameters, self._wanted.parameters.get("max_new_tokens")
        if not self.ids:
            return None, None
        stop_ids = () if parameters.get("ignore_eos") else parameters.get("stop_token_ids") or ()
        if self.ids[-1] in stop_ids:
            return "stop", None
        if (stop := self._stop_in(self.ids[-self._reach :])) is not None:
            return "stop", stop
        return ("length", None) if limit is not None and len(self.ids) >= limit else (None, None)

    def _check(self, piece: Piece) -> None:
        if piece.ids and not (min(piece.ids) >= 0 and max(piece.ids) < self._vocab_size):
            # Sent to an engine as part of a prompt, such an id kills it.
            raise EngineFault("nonsense", f"a token id lies outside the vocabulary of {self._vocab_size}")
        if piece.finish is None:
            versions: Iterable[int] = (piece.version,)
        else:
            versions = (span.version for span in piece.versions)
            self._check_last(piece)
        if self._wanted.version is not None and any(version != self._wanted.version for version in versions):
            raise EngineFault("nonsense", f"the engine does not serve version {self._wanted.version}")

    def _check_last(self, piece: Piece) -> None:
        end = 0
        for span in piece.versions:
            if span.start != end:
                raise EngineFault("nonsense", "the engine's version spans do not tile its output")
            end = span.end
        if end != len(self.ids) - self._start + len(piece.ids):
            raise EngineFault("nonsense", "the engine's version spans do not tile its output")
        # SGLang puts a stop token where its logits were NaN, and says so as if a stop string had matched.
        patterns = "stop_regex" in self._wanted.parameters
        if not (piece.matched is None or piece.matched in self._stops or patterns):
            raise EngineFault("nonsense", f"the engine stopped at {piece.matched!r}, which nobody asked for")

    def _is_unsure(self, piece: Piece) -> bool:
        """Whether to hold a piece back until its engine has said all, where no client watches.

        A grammar starts anew with another engine; and tokens that came in one event after weights changed
        may be of either version, which only the engine's last words tell.
        """
        changed = len(piece.ids) > 1 and self._version not in (None, piece.version)
        self._version = piece.version
        return self._wanted.stream_interval > 1 and (self._constrained or changed)

    def _handed(self, piece: Piece) -> Iterator[Piece]:
        self._handed_on += len(piece.ids)
        if piece.ids:
            yield piece

    def _released(self) -> Iterator[Piece]:
        held, self._held = self._held, []
        for piece in held:
            yield from self._handed(piece)

    # Who sampled what

    def _attribute(self, piece: Piece) -> None:
        """Note the versions of a piece's tokens; the engine's last words overrule what its events said."""
        start, end = len(self.ids), len(self.ids) + len(piece.ids)
        spans: tuple[Span, ...] = (Span(piece.version, 0, len(piece.ids)),)
        if piece.finish is not None and not self.cut:
            start, spans = self._start, piece.versions
            self._spans = _until(self._spans, start)
        for span in spans:
            self._append(span.version, start + span.start, min(start + span.end, end), piece.server)

    def _append(self, version: int, start: int, end: int, engine: str) -> None:
        last = self._spans[-1] if self._spans else None
        if last is not None and (last.version, last.engine) == (version, engine):
            self._spans[-1] = Span(version, last.start, end, engine)
        elif end > start:
            self._spans.append(Span(version, start, end, engine))

    def _versions(self) -> tuple[Span, ...]:
        if len({span.engine for span in self._spans}) > 1:
            return tuple(self._spans)
        return tuple(Span(span.version, span.start, span.end) for span in self._spans)

    # Stop strings

    def _stop_across_the_seam(self, new: list[int]) -> tuple[int, str] | None:
        """How many of `new` end an answer whose stop string began before this engine's part, and the string.

        An engine looks for stop strings in its own output only.
        """
        done = len(self.ids) - self._start
        if not (self._stops and self._start and new) or done >= self._reach:
            return None
        tail = self.ids[max(0, self._start - self._reach) :]
        near = new[: self._reach - done]
        if self._stop_in(tail + near) is None:
            return None
        count = 1 + bisect_left(
            range(1, len(near)), True, key=lambda n: self._stop_in(tail + near[:n]) is not None
        )
        stop = self._stop_in(tail + near[:count])
        return None if stop is None else (count, stop)

    def _stop_in(self, ids: list[int]) -> str | None:
        if not self._stops or not ids:
            return None
        text = self._text_of(ids)
        return next((stop for stop in self._stops if stop in text), None)


def _first(piece: Piece, count: int, stop: str) -> Piece:
    """A piece up to the token that completes a stop string."""
    return structs.replace(
        piece,
        ids=piece.ids[:count],
        logprobs=piece.logprobs[:count],
        top_logprobs=piece.top_logprobs[:count],
        finish="stop",
        matched=stop,
    )


def _until(spans: Iterable[Span], end: int) -> list[Span]:
    return [Span(s.version, s.start, min(s.end, end), s.engine) for s in spans if s.start < end]
