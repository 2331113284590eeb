"""An unfinished answer, to which one engine after another may contribute.

chunk of an engine ──▶ checked ──▶ delivered, or held back ──▶ last chunk: which server, which versions
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from msgspec import UNSET, structs

from gateway.errors import EngineFault
from gateway.fleet.event_stream import OutputChunk
from gateway.fleet.generate_request import (
    Adapter,
    AllowedVersions,
    GenerateBody,
    SampleRequest,
    SamplingParameters,
)
from rollout_queue.contract.records import Span


class PartialAnswer:
    """The tokens so far, which servers sampled them, and what is left to request."""

    def __init__(self, wanted: SampleRequest, text_of: Callable[[list[int]], str], vocab_size: int) -> None:
        self.ids: list[int] = []
        self.rid = wanted.rid
        self.finished = False
        self.cut_short = False
        """The answer ended before its engine did, at a stop string."""
        self._wanted = wanted
        self._parameters = wanted.parameters
        self._text_of = text_of
        self._vocab_size = vocab_size
        self._attempts = 0
        self._start = 0
        """How many tokens earlier engines have sampled: the part of the current engine begins there."""
        self._spans: list[Span] = []
        self._held: list[OutputChunk] = []
        """Chunks that are not delivered yet (`_must_hold`)."""
        self._delivered = 0
        """How many tokens were delivered."""
        self._version: int | None = None
        """The version that the current engine reported last."""
        self._constrained = wanted.parameters.structural_tag is not UNSET
        """A grammar constrains the answer. Each engine applies it from its own first token on, so no other
        engine can continue the answer."""
        self._stops: list[str] = wanted.parameters.stop or []
        self._window = max((len(stop.encode()) + 3 for stop in self._stops), default=0)
        """More tokens than any stop string can have, because a token is at least one byte of text."""
        self._engine_looks = True
        """The current engine looks for stop strings in its own output."""

    def next_request(self, tokenizer: bool = True, adapter: Adapter | None = None) -> GenerateBody:
        """The request to the next engine, which continues where the last one ended, with the adapter.

        An engine without a tokenizer cannot look for stop strings. Then each token comes in an event of its
        own, so that the answer can end with the token that completes one.
        """
        have, wanted = len(self.ids), self._wanted
        # No rid may begin with another one: SGLang aborts every request whose rid begins with the one given.
        self.rid = f"{self._attempts}.{self._wanted.rid}" if self._attempts else self._wanted.rid
        self._attempts += 1
        self._start, self._version = have, None
        self._engine_looks = tokenizer or not self._stops
        parameters = self._parameters
        if not self._engine_looks:
            parameters = structs.replace(parameters, stop=UNSET, stream_interval=1)
        return GenerateBody(
            rid=self.rid,
            input_ids=[*wanted.input_ids, *self.ids] if have else wanted.input_ids,
            # An engine draws by the seed and the token's position, so another one continues the same series.
            # Frequency and presence penalties count the engine's own output only, so they start again at 0.
            sampling_params=_rest(parameters, have) if have else parameters,
            top_logprobs_num=wanted.top_logprobs,
            return_routed_experts=UNSET if wanted.experts_from is None else True,
            routed_experts_start_len=UNSET if wanted.experts_from is None else wanted.experts_from,
            cache_salt=UNSET if wanted.cache_salt is None else wanted.cache_salt,
            lora_path=UNSET if adapter is None else adapter.name,
            image_data=wanted.images or UNSET,
        )

    def take(self, chunk: OutputChunk) -> Iterable[OutputChunk]:
        """The chunks that can be delivered now that `chunk` has arrived; the last one ends the answer.

        Raises EngineFault for a chunk that contradicts itself. If the engine aborts, raises EngineFault after
        the chunks that another engine can continue.
        """
        self._check(chunk)
        if self._stops and (ending := self._stop_unseen(chunk.ids)) is not None:
            self.cut_short = chunk.finish is None
            chunk = _first(chunk, *ending)
        self._attribute(chunk)
        hold = self._must_hold(chunk)
        self.ids += chunk.ids
        if chunk.finish is not None:
            return self._end(chunk)
        if hold or self._held:
            self._held.append(chunk)
            return ()
        self._delivered += len(chunk.ids)
        return (chunk,) if chunk.ids else ()

    def _end(self, chunk: OutputChunk) -> Iterator[OutputChunk]:
        self.finished = chunk.finish in ("stop", "length")
        if self.finished:
            yield from self._release()
            yield structs.replace(chunk, versions=self._versions())
            return
        if not self._constrained:
            yield from self._release()
            yield from self._deliver(structs.replace(chunk, finish=None, versions=()))
        raise EngineFault("aborted", "the engine aborted the answer")

    def keep_delivered(self) -> OutputChunk | None:
        """After a fault, drop the tokens that were not delivered.

        Returns the last chunk, without tokens, if the delivered tokens are a complete answer; else None.
        """
        self._held.clear()
        del self.ids[self._delivered :]
        self._spans = _until(self._spans, len(self.ids))
        finish, matched = self._ending()
        if finish is None:
            return None
        self.finished = True
        versions = self._versions()
        server = self._spans[-1].engine or ""
        end_id = self.ids[-1] if finish == "stop" and matched is None else None
        return OutputChunk(
            ids=[],
            logprobs=[],
            server=server,
            finish=finish,
            matched=matched,
            end_id=end_id,
            versions=versions,
        )

    @property
    def by_engine(self) -> int:
        """How many tokens the current engine has sampled."""
        return len(self.ids) - self._start

    @property
    def allowed(self) -> AllowedVersions:
        """Which policy versions may answer."""
        return self._wanted.allowed

    @property
    def has_stops(self) -> bool:
        """Whether a stop string can end the answer."""
        return bool(self._stops)

    @property
    def resumable(self) -> bool:
        """Whether another engine can continue the answer, or start it again before any of it is delivered. An
        engine would take a sampled pad for an image."""
        return not (self._delivered and self._constrained) and self._wanted.image_pads.isdisjoint(self.ids)

    def check_resumable(self, fault: EngineFault) -> None:
        """Raises the fault if no other engine can continue the answer."""
        if not self.resumable:
            raise fault

    def _ending(self) -> tuple[str | None, str | None]:
        """`finish` and the stop string if the tokens so far are the whole answer; else None for both."""
        if not self.ids:
            return None, None
        if self.ids[-1] in self._parameters.stop_token_ids:
            return "stop", None
        if (stop := self._stop_in(self.ids[-self._window :])) is not None:
            return "stop", stop
        return ("length", None) if len(self.ids) >= self._parameters.max_new_tokens else (None, None)

    def _check(self, chunk: OutputChunk) -> None:
        if chunk.ids and not (min(chunk.ids) >= 0 and max(chunk.ids) < self._vocab_size):
            # SGLang crashes on a prompt with such an id. After a failover, the prompt would contain this one.
            raise EngineFault("nonsense", f"a token id lies outside the vocabulary of {self._vocab_size}")
        if self._wanted.prompt_tokens is not None:
            self._check_prompt(chunk, self._wanted.prompt_tokens)
        versions: Iterable[int] = (chunk.version,)
        if chunk.finish is not None:
            versions = (span.version for span in chunk.versions)
            self._check_last(chunk)
        only = self._wanted.allowed.version
        if only is not None and any(version != only for version in versions):
            raise EngineFault("nonsense", f"the engine does not serve version {only}")

    def _check_prompt(self, chunk: OutputChunk, expected: int) -> None:
        """SGLang counts the prompt in each event, so nothing of a wrong answer is delivered."""
        # It is not counted if the engine aborts the request before it reads it.
        unknown = not chunk.prompt_tokens and chunk.finish in (None, "abort")
        if not unknown and chunk.prompt_tokens != expected + self._start:
            raise EngineFault("nonsense", f"the engine made other than {expected} tokens of the prompt")

    def _check_last(self, chunk: OutputChunk) -> None:
        end = 0
        for span in chunk.versions:
            if span.start != end:
                raise EngineFault("nonsense", "the engine's version spans do not tile its output")
            end = span.end
        if end != len(self.ids) - self._start + len(chunk.ids):
            raise EngineFault("nonsense", "the engine's version spans do not tile its output")
        # If its logits are NaN, SGLang writes a stop token and reports a text as if it were a stop string.
        if not (chunk.matched is None or chunk.matched in self._stops):
            raise EngineFault("nonsense", f"the engine stopped at {chunk.matched!r}, which was not requested")

    def _must_hold(self, chunk: OutputChunk) -> bool:
        """Whether to hold a chunk back until its engine has finished; never for a client that streams.

        A constrained answer is held back, because another engine would have to start it again. Tokens that
        arrive in one event after a change of weights are held back, because each may be of either version:
        only the engine's last event says which.
        """
        changed = len(chunk.ids) > 1 and self._version not in (None, chunk.version)
        self._version = chunk.version
        return self._parameters.stream_interval > 1 and (self._constrained or changed)

    def _deliver(self, chunk: OutputChunk) -> Iterator[OutputChunk]:
        self._delivered += len(chunk.ids)
        if chunk.ids:
            yield chunk

    def _release(self) -> Iterator[OutputChunk]:
        held, self._held = self._held, []
        for chunk in held:
            yield from self._deliver(chunk)

    # Versions and servers

    def _attribute(self, chunk: OutputChunk) -> None:
        """Note the versions of a chunk's tokens. Those in the engine's last event replace earlier ones."""
        start, end = len(self.ids), len(self.ids) + len(chunk.ids)
        spans: tuple[Span, ...] = (Span(chunk.version, 0, len(chunk.ids)),)
        if chunk.finish is not None and not self.cut_short:
            start, spans = self._start, chunk.versions
            self._spans = _until(self._spans, start)
        for span in spans:
            self._append(span.version, start + span.start, min(start + span.end, end), chunk.server)

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

    def _stop_unseen(self, new: list[int]) -> tuple[int, str] | None:
        """Find a stop string that the engine does not see.

        An engine does not see those that began in an earlier engine's part, and without a tokenizer none.
        Returns how many tokens of `new` complete the string, and the string; None if there is none.
        """
        if not new:
            return None
        tail, near = self.ids[-self._window :], new
        if self._engine_looks:
            done = len(self.ids) - self._start
            if not self._start or done >= self._window:
                return None
            tail, near = self.ids[max(0, self._start - self._window) :], new[: self._window - done]
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


def _rest(parameters: SamplingParameters, have: int) -> SamplingParameters:
    """The parameters of an answer that has `have` tokens already."""
    left, least = parameters.max_new_tokens - have, parameters.min_new_tokens
    if least is UNSET:
        return structs.replace(parameters, max_new_tokens=left)
    return structs.replace(parameters, max_new_tokens=left, min_new_tokens=max(0, least - have))


def _first(chunk: OutputChunk, count: int, stop: str) -> OutputChunk:
    """The beginning of a chunk, up to the token that completes a stop string."""
    return structs.replace(
        chunk,
        ids=chunk.ids[:count],
        logprobs=chunk.logprobs[:count],
        top_logprobs=chunk.top_logprobs[:count],
        experts=None,  # they may be those of further tokens
        finish="stop",
        matched=stop,
        end_id=None,
    )


def _until(spans: Iterable[Span], end: int) -> list[Span]:
    return [Span(s.version, s.start, min(s.end, end), s.engine) for s in spans if s.start < end]
