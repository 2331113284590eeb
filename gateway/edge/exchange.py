"""The story of one call: who asks, in which session, what is sampled, and how it is told.

arrival ──▶ caller ──▶ ask ──▶ session ──▶ generations ──▶ recorded ──▶ reply
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.collaborators import Collaborators
from gateway.dialects.base import Answered, Ask, Dialect
from gateway.edge.choices import each, sample_each
from gateway.edge.errors import ANSWERABLE, api_error
from gateway.edge.reply import Reply
from gateway.edge.request import Arrival
from gateway.edge.retries import Flight, attempt_of, request_digest
from gateway.engines.stream import Piece
from gateway.generations.generation import Generation, tokens_of
from gateway.language.deltas import AnswerStream, RawTextStream
from gateway.rest.models import pinned_version
from gateway.sessions.belonging import HEADERS
from gateway.sessions.identity import Caller
from rollout_queue.http.errors import ApiError

logger = logging.getLogger(__name__)

MOST_HEADER_CHARS = 2048
"""aiohttp takes 8 KiB a header, Node 16 KiB for all of them."""


@dataclass(frozen=True)
class Exchange:
    """Serves every call of one dialect."""

    dialect: Dialect

    def error(self, error: ApiError) -> bytes:
        return self.dialect.error(error)

    async def serve(self, gateway: Collaborators, arrival: Arrival, reply: Reply) -> None:
        caller = gateway.identities.caller(arrival.headers)
        attempt = attempt_of(arrival.headers)
        digest = request_digest(self.dialect.prefix, arrival.body)
        key = (caller, arrival.session_id, *map(arrival.headers.get, HEADERS), digest)
        if (joined := gateway.flights.join(key, attempt)) is not None:
            await joined.follow(reply)
            return
        with gateway.flights.begin(key, digest, attempt, reply, arrival.client) as flight:
            await self._answer(gateway, caller, arrival, reply, flight)

    async def _answer(
        self, gateway: Collaborators, caller: Caller, arrival: Arrival, reply: Reply, flight: Flight
    ) -> None:
        ask = await self.dialect.read(gateway, caller, arrival)
        head = await gateway.belonging.session_of(
            arrival, caller, ask, flight.digest if flight.attempt else None
        )
        version = pinned_version(gateway, ask.model, head.spec.policy)
        generations = await gateway.generator.begin(
            head, ask.calls, ask.n, version, self.dialect.prefix, arrival.heavy, flight
        )
        if ask.stream and not head.stored:
            await gateway.belonging.open(head, caller)
        answer = _stream if ask.stream else _plain
        try:
            await answer(gateway, ask, generations, reply)
        except asyncio.CancelledError:
            await gateway.recorder.record_left(generations)
            raise
        finally:
            if gateway.admission.charges and any(generation.ids for generation in generations):
                gateway.admission.spend(head.spec.owner, sum(tokens_of(generations, ask.n)))


async def _plain(gateway: Collaborators, ask: Ask, generations: Sequence[Generation], reply: Reply) -> None:
    """All answers are sampled before the first is recorded: a call that cannot be sampled leaves nothing to
    train. One that cannot be recorded whole leaves samples that nobody heard, as a gateway that dies does."""
    await each(gateway.generator.sample, generations)
    recorded = await each(gateway.recorder.record, generations)
    answered = [Answered(made, *kept) for made, kept in zip(generations, recorded, strict=True)]
    if ask.keep is not None:
        await ask.keep(answered)
    await reply.whole(200, ask.telling.plain(answered), reply_headers(generations))


async def _stream(gateway: Collaborators, ask: Ask, generations: Sequence[Generation], reply: Reply) -> None:
    """The stream begins when the engine does: an error before the first token is still a status code."""
    events = ask.telling.events(generations)
    reply.keep_alive(events.heartbeat, gateway.settings.heartbeat_s, lambda: reply_headers(generations))
    answers = [_reading(gateway, generation) for generation in generations]
    answered: dict[int, Answered] = {}
    told = events.opening()
    heard = [0] * len(generations)
    """Tokens whose logprobs are told: side by side, an answer may be ahead of the piece that is heard."""

    async def hear(index: int, piece: Piece | None) -> None:
        nonlocal told
        generation = generations[index]
        if piece is not None:
            start, heard[index] = heard[index], len(generation.ids)
            told += events.piece(index, answers[index].feed(piece.ids), start)
        else:
            answered[index] = done = Answered(generation, *await gateway.recorder.record(generation))
            told += events.piece(index, answers[index].finish(done.answer), len(generation.ids))
            told += events.closing(index, done)
        if not reply.begun:
            await reply.open(reply_headers(generations))
        if told:
            now, told = told, b""
            await reply.write(now)

    try:
        await sample_each(gateway.generator.sample, generations, hear)
        if ask.keep is not None:
            await ask.keep([answered[index] for index in sorted(answered)])
        await reply.close(events.ending())
    except ANSWERABLE as error:
        if not reply.begun:
            raise
        await reply.close(events.failing(api_error(error)))
    except Exception:  # outermost frame of a stream: a bug of ours, and the client still hears of it
        if not reply.begun:
            raise
        logger.exception("a stream failed")
        await reply.close(events.failing(ApiError(500, "internal error")))


def _reading(gateway: Collaborators, generation: Generation) -> AnswerStream | RawTextStream:
    call = generation.call
    if call.prompt_ids is not None:
        return RawTextStream(gateway.renderer, call.stop)
    prompt_ids = generation.prompt.prompt_ids
    return AnswerStream(gateway.renderer, call.tools, generation.turn_id, call.stop, prompt_ids)


def reply_headers(generations: Sequence[Generation]) -> dict[str, str]:
    """What the agent may know of how its answer was made."""
    first = generations[0]
    return {
        "x-weir-session-id": first.head.spec.session_id,
        "x-weir-turn-id": ",".join([generation.turn_id for generation in generations]),
        "x-weir-policy-version": str(first.versions[0].version) if first.versions else "",
        "x-weir-sampling": _in_a_header(first.sampling.used),
        "x-weir-sampling-asked": _in_a_header(first.sampling.asked),
    }


def _in_a_header(parameters: Mapping[str, Any]) -> str:
    """As JSON. Clients refuse long headers: a long list of biases stands in the record alone."""
    text = msgspec.json.encode(parameters).decode()
    if len(text) <= MOST_HEADER_CHARS:
        return text
    return msgspec.json.encode({**parameters, "logit_bias": None}).decode()
