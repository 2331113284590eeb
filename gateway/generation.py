"""One generation, whichever dialect asked for it: placed, sampled, recorded, and only then answered.

call ──▶ session ──▶ parent and prompt ──▶ sampling ──▶ engine ──▶ pieces … ──▶ turn in Redis ──▶ answer
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from gateway.conversation import Prompt, extend, place, reply_message
from gateway.engine import EngineClient, EngineRequest, Piece
from gateway.fleet import Fleet, RolloutServer
from gateway.metrics import Metrics
from gateway.render import Answer, ChatRenderer, Message, Tool
from gateway.sampling import decide, engine_parameters
from gateway.settings import GatewaySettings
from rollout_queue.errors import InvalidRecord, QueueError, SessionClosed, StorageUnavailable
from rollout_queue.head import SessionHead
from rollout_queue.records import Finish, Sampling, Span, Turn
from rollout_queue.stream import StreamWriter
from rollout_queue.tokens import Logprobs, TokenIds
from rollout_queue.web.errors import ApiError, storage_unavailable

logger = logging.getLogger(__name__)

WHOLE_ANSWER_INTERVAL = 64
"""Tokens per engine event for a client that waits for the whole answer."""


@dataclass(frozen=True)
class Call:
    """What a dialect asks for, free of its wire shape."""

    messages: list[Message]
    tools: list[Tool] | None
    asked: dict[str, Any]
    """Sampling parameters that the caller sent, in OpenAI's names."""
    stop: list[str]
    stream: bool
    top_logprobs: int = 0
    version: int | None = None
    """Only this policy version may answer."""


@dataclass
class Generation:
    """One answer in the making."""

    call: Call
    head: SessionHead
    prompt: Prompt
    sampling: Sampling
    completion_id: str
    """What the reply is called; the choices of one call share it."""
    turn_id: str = field(default_factory=lambda: uuid4().hex)
    started_at: float = field(default_factory=time.time)
    server: RolloutServer | None = None
    first_version: int | None = None
    """The version at the first token, as far as it is known before the last."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    finish: str | None = None
    matched: str | None = None
    versions: tuple[Span, ...] = ()

    def take(self, piece: Piece) -> None:
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.top_logprobs += piece.top_logprobs
        if piece.finish is not None:
            self.finish, self.matched, self.versions = piece.finish, piece.matched, piece.versions


class Generator:
    """Places, samples and records generations."""

    def __init__(
        self,
        settings: GatewaySettings,
        renderer: ChatRenderer,
        writer: StreamWriter,
        engine: EngineClient,
        fleet: Fleet,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._renderer = renderer
        self._writer = writer
        self._engine = engine
        self._fleet = fleet
        self._metrics = metrics
        self._unfinished: set[asyncio.Task[None]] = set()
        self._context_length = settings.context_length or renderer.config.max_position_embeddings

    def begin(self, head: SessionHead, call: Call, count: int) -> list[Generation]:
        """Find the call's place and its sampling, for `count` answers.

        Raises ApiError 400 for what cannot be rendered or does not fit.
        """
        try:
            prompt = place(self._renderer, head, call.messages, call.tools)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            # A stranger's messages, read by the library that knows the template.
            raise ApiError(400, f"the messages cannot be rendered: {error}", param="messages") from error
        room = self._context_length - len(prompt.prompt_ids)
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {len(prompt.prompt_ids)} tokens; the context holds {self._context_length}, "
                "the answer included",
                param="messages",
                code="context_length_exceeded",
            )
        if foreign := self._foreign(prompt.prompt_ids):
            raise ApiError(400, foreign, param="messages", code="token_out_of_vocabulary")
        sampling = decide(head.spec.sampling, call.asked, room, head.spec.train)
        completion_id = f"chatcmpl-{uuid4().hex}"
        return [Generation(call, head, prompt, sampling, completion_id) for _ in range(count)]

    async def sample(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        """Stream the answer from an engine. A caller that stops listening aborts it, and that is recorded."""
        call, wait_s = generation.call, self._settings.engine_wait_s
        server = await self._fleet.acquire(generation.head.spec.session_id, call.version, wait_s)
        generation.server, generation.first_version = server, server.version
        request = EngineRequest(
            rid=generation.turn_id,
            input_ids=generation.prompt.prompt_ids.tolist(),
            parameters=engine_parameters(generation.sampling, self._renderer.stop_ids, call.stop),
            stream_interval=1 if call.stream else WHOLE_ANSWER_INTERVAL,
            top_logprobs=call.top_logprobs,
        )
        try:
            with self._fleet.load(server):
                async with aclosing(self._engine.generate(server.registration.engine_url, request)) as pieces:
                    async for piece in pieces:
                        generation.take(piece)
                        yield piece
        except (asyncio.CancelledError, GeneratorExit):
            await self._to_the_end(self._abandon(generation, server))
            raise
        if generation.finish == "abort":
            raise ApiError(503, "the engine aborted the answer")
        if foreign := self._foreign(generation.ids):
            raise ApiError(503, f"the engine's answer is broken: {foreign}")

    async def complete(self, generation: Generation) -> tuple[Turn, Answer]:
        """Sample the whole answer and record it."""
        async with aclosing(self.sample(generation)) as pieces:
            async for _ in pieces:
                pass
        return await self.record(generation)

    async def record(self, generation: Generation) -> tuple[Turn, Answer]:
        """Append the turn; when this returns, it is in Redis.

        Raises ApiError 503 when it cannot be stored or the engine's answer contradicts itself, 409 when the
        session ended meanwhile.
        """
        answer = self._answer(generation)
        finish: Finish = "length" if generation.finish == "length" else "stop"
        if answer.tool_calls and finish == "stop":
            finish = "tool_calls"
        reply_digest = extend(generation.prompt.digest, reply_message(answer)).hex()
        try:
            turn = self._turn(generation, finish, reply_digest)
            await self._to_the_end(self._append(turn, generation.head))
        except InvalidRecord as error:
            raise ApiError(503, f"the engine's answer is broken: {error}") from error
        except StorageUnavailable as error:
            raise storage_unavailable(error) from error
        except SessionClosed as error:
            raise ApiError(409, str(error), code="session_finished") from error
        return turn, answer

    async def close(self) -> None:
        """Finish the records that clients who left did not wait for."""
        await asyncio.gather(*self._unfinished, return_exceptions=True)

    async def _append(self, turn: Turn, head: SessionHead) -> None:
        started = time.monotonic()
        await self._writer.append_turn(turn, turn.finished_at + head.spec.ttl_s, head.spec.owner)
        self._metrics.turn_recorded(turn, time.monotonic() - started)

    async def _to_the_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work that goes on when the caller is cancelled: what was sampled is recorded all the same."""
        task = asyncio.create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        await asyncio.shield(task)

    def _answer(self, generation: Generation) -> Answer:
        answer = self._renderer.parse(generation.ids, generation.call.tools, generation.turn_id)
        if generation.matched is None:
            return answer
        content = answer.content.partition(generation.matched)[0].rstrip()
        return Answer(content, answer.reasoning, answer.tool_calls)

    def _turn(self, generation: Generation, finish: Finish, reply_digest: str) -> Turn:
        spec, prompt = generation.head.spec, generation.prompt
        versions = generation.versions
        if not versions and generation.ids:
            versions = (Span(generation.first_version or 0, 0, len(generation.ids)),)
        return Turn(
            turn_id=generation.turn_id,
            session_id=spec.session_id,
            parent_id=prompt.parent.turn_id if prompt.parent else None,
            group_id=spec.group_id,
            task_id=spec.task_id,
            policy=spec.policy or self._settings.model_name,
            lineage=spec.lineage,
            relation=prompt.relation,
            reason=prompt.reason,
            context_ids=prompt.context_ids,
            output_ids=TokenIds(generation.ids),
            logprobs=Logprobs(generation.logprobs),
            versions=versions,
            sampling=generation.sampling,
            finish=finish,
            train=spec.train,
            started_at=generation.started_at,
            finished_at=time.time(),
            engine=generation.server.id if generation.server else "",
            completion_id=generation.completion_id,
            prompt_digest=prompt.digest.hex(),
            reply_digest=reply_digest,
        )

    async def _abandon(self, generation: Generation, server: RolloutServer) -> None:
        """The client went away: stop the engine's work, and record what there is as aborted."""
        await self._engine.abort(server.registration.engine_url, generation.turn_id)
        try:
            if foreign := self._foreign(generation.ids):
                raise InvalidRecord(foreign)
            await self._append(self._turn(generation, "abort", ""), generation.head)
        except QueueError as error:
            logger.warning("aborted turn %s is not recorded: %s", generation.turn_id, error)

    def _foreign(self, ids: Sequence[int]) -> str:
        """Says which id is none of the model's: one such id in a prompt kills an SGLang engine."""
        size = self._renderer.config.vocab_size
        foreign = next((token_id for token_id in ids if not 0 <= token_id < size), None)
        return "" if foreign is None else f"token id {foreign} lies outside the vocabulary of {size}"
