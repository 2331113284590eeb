"""Takes one model call from HTTP request to reply.

request ──▶ caller ──▶ parsed request ──▶ session ──▶ generations ──▶ recorded turns ──▶ reply

`/v1/messages/count_tokens`: how many tokens the prompt of a request has.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from gateway.callers.identity import Caller
from gateway.counters import CallFigures
from gateway.dialects.base import Dialect, ParsedRequest, RecordedAnswer
from gateway.dialects.fields import Reading, ignored_header
from gateway.dialects.messages import Messages, request_of
from gateway.dialects.messages_wire import InputTokens
from gateway.dialects.wire import encode
from gateway.edge.background_answers import BackgroundAnswers, UnreadCall
from gateway.edge.choices import for_each, sample_each
from gateway.edge.errors import ANSWERABLE, api_error
from gateway.edge.joins import Joins
from gateway.edge.reply import Reply, answer_stream, opening_headers, reply_headers, written
from gateway.edge.request import AgentRequest, has_images, with_images
from gateway.edge.calls import CallKey, InFlightCall, InFlightCalls, ToldStream, attempt_of, request_digest
from gateway.fleet.event_stream import OutputChunk
from gateway.generations.generation import ClientCall, Generation, pinned, tokens_of
from gateway.parts import GatewayParts
from gateway.sessions.resolution import HEADERS, SessionClues
from rollout_queue import clock
from rollout_queue.contract.head import SessionHead
from rollout_queue.foreign_json import LARGE_BYTES
from rollout_queue.http.errors import ApiError
from rollout_queue.http.json_routes import worked
from rollout_queue.service_log import log_ids

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exchange:
    """The endpoint of one dialect. `serve` takes one agent call from HTTP request to reply."""

    dialect: Dialect
    gateway: GatewayParts
    calls: InFlightCalls
    joins: Joins
    answers: BackgroundAnswers
    figures: CallFigures

    def error(self, error: ApiError) -> bytes:
        return self.dialect.error(error)

    async def serve(self, request: AgentRequest, reply: Reply) -> None:
        caller = request.caller
        attempt = attempt_of(request.headers)
        body, prefix = request.body, self.dialect.prefix
        if len(body) <= LARGE_BYTES:
            digest = request_digest(prefix, body)
        else:
            digest = await worked(caller.payer, body, request_digest, prefix, body)
        key = CallKey(caller, request.session_id, tuple(map(request.headers.get, HEADERS)), digest)
        if (joined := self.calls.join(key, attempt)) is not None:
            request.release()
            await joined.follow(reply)
            return
        if self.calls.may_join(attempt) and await self.joins.answered(key, attempt, reply):
            return
        call = self.calls.begin(key, digest, attempt, reply, request.client)
        try:
            with call:
                await self._answer(caller, request, reply, call)
        finally:
            await call.flush()

    async def _answer(self, caller: Caller, request: AgentRequest, reply: Reply, call: InFlightCall) -> None:
        gateway, figures, began = self.gateway, self.figures, clock.monotonic()
        with Reading(report=gateway.settings.unknown_fields == "report") as ignored:
            parsed = await self.dialect.read(caller, request.body, request.heavy)
        if ignored.paths:
            figures.ignoring += 1
            parsed = _ignoring(parsed, tuple(ignored.paths))
        for each in parsed.calls:
            gateway.renderer.refuse_too_long(each.messages)
        if caller.session_id is None:
            reply.more_headers = partial(gateway.admission.rate_headers, caller.owner)
        if shows := any(has_images(each) for each in parsed.calls):
            # Images take much work, which a call that is refused must not cause.
            await gateway.resolver.check(_clues(request, parsed, call), caller)
            calls = [await with_images(gateway.images, each, request.held) for each in parsed.calls]
            parsed = msgspec.structs.replace(parsed, calls=calls)
        was_read = figures.read.since(began)
        head = await gateway.resolver.resolve(_clues(request, parsed, call), caller, counted=shows)
        log_ids().session_id = head.spec.session_id
        reply.more_headers = partial(gateway.admission.rate_headers, head.spec.owner)
        figures.session.since(was_read)
        async with gateway.in_flight.call(head):
            await self._answer_in(head, caller, request, parsed, reply, call)

    async def _answer_in(
        self,
        head: SessionHead,
        caller: Caller,
        request: AgentRequest,
        parsed: ParsedRequest,
        reply: Reply,
        call: InFlightCall,
    ) -> None:
        """Answer a call in its session."""
        gateway = self.gateway
        policy = await pinned(
            gateway.settings, gateway.fleet, gateway.adapters, parsed.model, head.spec.policy
        )
        client: ClientCall = call
        if parsed.background is not None:
            client = UnreadCall(call.digest, call.attempt, call.attempt, self.figures)
        generations = await gateway.generator.begin(
            head, parsed.calls, parsed.n, policy, self.dialect.prefix, request.heavy, client
        )
        request.release()
        if not head.stored:
            if parsed.stream or parsed.background is not None:
                await gateway.resolver.open(head, caller)
            else:
                await gateway.resolver.check_storage()
        if parsed.background is not None:
            body = await self.answers.start(gateway, parsed.background, generations[0], request.held)
            await reply.send_json(200, body, reply_headers(generations))
            return
        try:
            if parsed.stream:
                await _stream(gateway, parsed, generations, reply, call)
            else:
                await _whole(gateway, parsed, generations, reply)
        except asyncio.CancelledError:
            await gateway.recorder.record_unrecorded(generations)
            raise
        finally:
            if any(generation.ids for generation in generations):
                gateway.admission.spend(head.spec.owner, sum(tokens_of(generations, parsed.n)))


def _ignoring(parsed: ParsedRequest, paths: tuple[str, ...]) -> ParsedRequest:
    """The request, whose turns record the paths of the fields that are ignored."""
    calls = [msgspec.structs.replace(each, ignored_fields=paths) for each in parsed.calls]
    return msgspec.structs.replace(parsed, calls=calls)


def _clues(request: AgentRequest, parsed: ParsedRequest, call: InFlightCall) -> SessionClues:
    return SessionClues(
        call=parsed.calls[0],
        headers=request.headers,
        path_id=request.session_id,
        metadata=parsed.metadata,
        previous_id=parsed.session_id,
        repeated_digest=call.digest if call.attempt else None,
    )


async def _whole(
    gateway: GatewayParts, parsed: ParsedRequest, generations: Sequence[Generation], reply: Reply
) -> None:
    """Answer with one body.

    All answers are sampled before the first is recorded, so a call whose sampling fails leaves nothing to
    train. If one answer cannot be recorded, the client gets an error, and recorded answers stay recorded.
    """
    await for_each(gateway.generator.sample, generations)
    turns = await for_each(gateway.recorder.record, generations)
    recorded = [RecordedAnswer(made, *turn) for made, turn in zip(generations, turns, strict=True)]
    if parsed.store is not None:
        await parsed.store(recorded)
    body = await written(generations, parsed.responder.body, recorded)
    await reply.send_json(200, body, reply_headers(generations))


async def _stream(
    gateway: GatewayParts,
    parsed: ParsedRequest,
    generations: Sequence[Generation],
    reply: Reply,
    call: InFlightCall,
) -> None:
    """Answer with server-sent events.

    The stream opens with the first chunk of an engine, or earlier with a heartbeat, once an engine works on
    the answer. An error before then still has its HTTP status, so clients repeat the call.
    """
    events = parsed.responder.events(generations)

    reply.keep_alive(events.heartbeat, gateway.settings.heartbeat_s, lambda: opening_headers(generations))
    answers = [answer_stream(gateway, generation) for generation in generations]
    call.stream = told = ToldStream(gateway, parsed, generations)
    recorded = told.recorded
    unsent = events.opening()
    passed = [0] * len(generations)
    """How many tokens of each choice were passed to `piece`. A generation may have tokens of later chunks."""

    async def on_chunk(index: int, chunk: OutputChunk | None) -> None:
        nonlocal unsent
        generation = generations[index]
        if chunk is not None:
            new, passed[index] = range(passed[index], len(generation.ids)), len(generation.ids)
            unsent += events.piece(index, answers[index].feed(chunk.text_ids), new)
        else:
            recorded[index] = done = RecordedAnswer(generation, *await gateway.recorder.record(generation))
            unsent += events.piece(index, answers[index].finish(done.answer), range(0))
            closing = await written([generation], events.closing, index, done)
            unsent += closing
        if not reply.begun:
            await reply.open_stream(reply_headers(generations))
        if unsent:
            now, unsent = unsent, b""
            await reply.write(now)

    try:
        await sample_each(gateway.generator.sample, generations, on_chunk)
        if parsed.store is not None:
            await parsed.store([recorded[index] for index in sorted(recorded)])
        await reply.close(events.ending())
    except ANSWERABLE as error:
        if not reply.begun:
            raise
        told.failure = api_error(error)
        await reply.close(events.failing(told.failure))
    except asyncio.CancelledError:
        if reply.begun and call.ending is not None:
            await reply.close(events.failing(call.ending))
        raise
    except Exception:  # a bug; only here can the open stream still end with an error event
        if not reply.begun:
            raise
        logger.exception("a stream failed")
        told.failure = ApiError(500, "internal error")
        await reply.close(events.failing(told.failure))


@dataclass(frozen=True)
class TokenCount:
    """The endpoint that counts the tokens of a prompt. A request counts as a call, and samples nothing."""

    messages: Messages
    gateway: GatewayParts
    figures: CallFigures

    async def serve(self, request: AgentRequest, reply: Reply) -> None:
        gateway = self.gateway
        with Reading(report=gateway.settings.unknown_fields == "report") as ignored:
            payer, body, context_length = request.caller.payer, request.body, gateway.renderer.context_length
            asked = await worked(payer, body, request_of, body, context_length)
            prompt = await worked(payer, body, self.messages.prompt_of, asked)
        self.figures.ignoring += bool(ignored.paths)
        owner = await gateway.sessions.owner_of(request.caller)
        reply.more_headers = partial(gateway.admission.rate_headers, owner)
        gateway.admission.check_call(owner)
        call = await with_images(gateway.images, prompt, request.held)
        count = await gateway.generator.count(call, self.figures, owner)
        await reply.send_json(200, encode(InputTokens(count)), ignored_header(tuple(ignored.paths)))

    def error(self, error: ApiError) -> bytes:
        return self.messages.error(error)
