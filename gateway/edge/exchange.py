"""Takes one model call from HTTP request to reply.

request ──▶ caller ──▶ parsed request ──▶ session ──▶ generations ──▶ recorded turns ──▶ reply

TokenCount serves `/v1/messages/count_tokens`: how many tokens the prompt of a request has.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from gateway.counters import CallFigures
from gateway.dialects.base import Dialect, ParsedRequest, RecordedAnswer
from gateway.dialects.fields import Reading, ignored_header
from gateway.dialects.messages import Messages, request_of
from gateway.dialects.messages_wire import InputTokens
from gateway.dialects.wire import encode
from gateway.edge.background_answers import BackgroundAnswers
from gateway.edge.calls import CallKey, InFlightCall, InFlightCalls, attempt_of, request_digest
from gateway.edge.joins import Joins
from gateway.edge.reply import Reply, reply_headers, written
from gateway.edge.request import AgentRequest, has_images, with_images
from gateway.generations.generation import ClientCall, Generation, UnreadCall, pinned, tokens_of
from gateway.generations.generator import for_each
from gateway.parts import GatewayParts
from gateway.sessions.resolution import HEADERS, SessionClues
from rollout_queue import clock
from rollout_queue.contract.head import SessionHead
from rollout_queue.foreign_json import LARGE_BYTES
from rollout_queue.http.errors import ApiError
from rollout_queue.http.json_routes import worked
from rollout_queue.service_log import log_ids


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
        attempt = attempt_of(request.headers)
        body, prefix = request.body, self.dialect.prefix
        if len(body) <= LARGE_BYTES:
            digest = request_digest(prefix, body)
        else:
            digest = await worked(request.caller.payer, body, request_digest, prefix, body)
        key = CallKey(request.caller, request.session_id, tuple(map(request.headers.get, HEADERS)), digest)
        if self.calls.may_join(attempt):
            if (joined := self.calls.join(key, attempt)) is not None:
                request.release()
                await joined.follow(reply)
                return
            if await self.joins.answered(key, attempt, reply):
                return
        request.held = request.held.moved()
        call = self.calls.begin(key, attempt, self.figures, request.client, partial(self._answer, request))
        await call.follow(reply)

    async def _answer(self, request: AgentRequest, call: InFlightCall) -> None:
        """Make the answer to a call."""
        gateway, figures, caller, began = self.gateway, self.figures, request.caller, clock.monotonic()
        with request.held:
            with Reading(report=gateway.settings.unknown_fields == "report") as ignored:
                parsed = await self.dialect.read(caller, request.body, request.heavy)
            if ignored.paths:
                figures.ignoring += 1
                parsed = _ignoring(parsed, tuple(ignored.paths))
            for each in parsed.calls:
                gateway.renderer.refuse_too_long(each.messages)
            if caller.session_id is None:
                call.more_headers = partial(gateway.admission.rate_headers, caller.owner)
            clues = _clues(request, parsed, call)
            if shows := any(has_images(each) for each in parsed.calls):
                # Images take much work, which a call that is refused must not cause.
                await gateway.resolver.check(clues, caller)
                calls = [await with_images(gateway.images, each, request.held) for each in parsed.calls]
                parsed = msgspec.structs.replace(parsed, calls=calls)
                clues = _clues(request, parsed, call)
            was_read = figures.read.since(began)
            head = await gateway.resolver.resolve(clues, caller, counted=shows)
            log_ids().session_id = head.spec.session_id
            call.more_headers = partial(gateway.admission.rate_headers, head.spec.owner)
            figures.session.since(was_read)
            session = await gateway.in_flight.enter(head)
            try:
                await self._answer_in(head, request, parsed, call)
            finally:
                gateway.in_flight.leave(session)

    async def _answer_in(
        self, head: SessionHead, request: AgentRequest, parsed: ParsedRequest, call: InFlightCall
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
            if parsed.stream or parsed.background is not None:  # the reply names it before its first turn
                await gateway.sessions.open(head.spec, request.caller)
            else:
                await gateway.writer.ping()  # before an engine works for an answer that could not be stored
        if parsed.background is not None:
            body = await self.answers.start(gateway, parsed.background, generations[0], request.held)
            call.answer_with(body, reply_headers(generations))
            return
        try:
            if parsed.stream:
                await self._stream(parsed, generations, call)
            else:
                await self._whole(parsed, generations, call)
        except asyncio.CancelledError:
            await gateway.recorder.record_unrecorded(generations)
            raise
        finally:
            if any(generation.ids for generation in generations):
                gateway.admission.spend(head.spec.owner, sum(tokens_of(generations, parsed.n)))

    async def _whole(
        self, parsed: ParsedRequest, generations: Sequence[Generation], call: InFlightCall
    ) -> None:
        """Answer with one body.

        All answers are sampled before the first is recorded, so a call whose sampling fails leaves nothing to
        train. If one answer cannot be recorded, the client gets an error, and recorded answers stay recorded.
        """
        await for_each(self.gateway.generator.sample, generations)
        turns = await for_each(self.gateway.recorder.record, generations)
        recorded = [RecordedAnswer(made, *turn) for made, turn in zip(generations, turns, strict=True)]
        if parsed.store is not None:
            await parsed.store(recorded)
        body = await written(generations, parsed.responder.body, recorded)
        call.answer_with(body, reply_headers(generations))

    async def _stream(
        self, parsed: ParsedRequest, generations: Sequence[Generation], call: InFlightCall
    ) -> None:
        """Answer with server-sent events.

        The stream opens with the first chunk of an engine, or earlier with a heartbeat, once an engine works
        on the answer. An error before then still has its HTTP status, so clients repeat the call.
        """
        recorded = call.stream_as(self.gateway, parsed, generations)

        async def make(numbered: tuple[int, Generation]) -> None:
            index, generation = numbered
            await self.gateway.generator.sample(generation, call.appended)
            turn = await self.gateway.recorder.record(generation)
            recorded[index] = RecordedAnswer(generation, *turn)
            call.wake()

        await for_each(make, list(enumerate(generations)))
        if parsed.store is not None:
            await parsed.store([recorded[index] for index in sorted(recorded)])


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
