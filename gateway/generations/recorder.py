"""Records generations as turns: a client receives the end of an answer only after its turn is in Redis.

generation ──parse──▶ answer ──▶ turn ──append──▶ Redis ──▶ the dialect writes the end of the reply

It also counts the tokens of an answer's thought, for `usage`, and says what the spans of a generation show,
by the conventions `gen_ai.*` and our own `rl.*`: no text of it.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from gateway.errors import EngineFault, StateConflict
from gateway.generations.conversation import reply_message
from gateway.generations.digests import extend
from gateway.generations.generation import Generation
from gateway.language.deltas import before_stop, rest_of
from gateway.language.parsed_answer import ParsedAnswer
from gateway.language.partial_parse import fast_parser
from gateway.language.render import ChatRenderer
from gateway.language.tokenizer import BareTokenizer, text_and_ends
from gateway.policies.canary_watch import CanaryWatch
from gateway.prometheus import Metrics
from gateway.settings import GatewaySettings
from rollout_queue import clock
from rollout_queue.contract.errors import InvalidRecord, QueueError, SessionClosed
from rollout_queue.contract.packed_tokens import TokenIds
from rollout_queue.contract.records import Finish, Turn
from rollout_queue.redis.stream_writer import StreamWriter
from rollout_queue.service_log import of_turn
from rollout_queue.tracing import Attributes, span


def tokens_of_thought(tokenizer: BareTokenizer, ids: Sequence[int], thought: str) -> int:
    """How many of the ids lie between the marks of the thought, the blanks around it included.

    If the thought is no text in one piece, because there are several: as many tokens as it is encoded in.
    """
    for bytes_of in (partial(_unmarked, tokenizer), tokenizer.token_bytes):
        text, ends = text_and_ends(ids, bytes_of)
        start = text.find(thought)
        if start >= 0:
            end = start + len(thought)
            start, end = len(text[:start].rstrip()), len(text) - len(text[end:].lstrip())
            starts = [0, *ends[:-1]]
            return sum(first < end and last > start for first, last in zip(starts, ends, strict=True))
    return min(len(tokenizer.encode(thought)), len(ids))


def _unmarked(tokenizer: BareTokenizer, token_id: int) -> bytes:
    """The bytes of a token; of a mark such as `<think>` others, so that no thought is found in it."""
    return b"\0" if token_id in tokenizer.added_ids else tokenizer.token_bytes(token_id)


def operation_of(generation: Generation) -> str:
    """What the engine does, in the names of the conventions."""
    return "chat" if generation.call.prompt_ids is None else "text_completion"


def asked_attributes(generation: Generation, model: str) -> Attributes:
    """Of the call to an engine."""
    used = generation.sampling.used
    return {
        "gen_ai.operation.name": operation_of(generation),
        "gen_ai.provider.name": "sglang",
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": used.get("temperature"),
        "gen_ai.request.top_p": used.get("top_p"),
        "gen_ai.request.max_tokens": used.get("max_new_tokens"),
        "gen_ai.request.stream": generation.call.stream,
        "gen_ai.conversation.id": generation.head.spec.session_id,
        "gen_ai.usage.input_tokens": len(generation.prompt.prompt_ids),
        "rl.turn.id": generation.turn_id,
    }


def sampled_attributes(generation: Generation) -> Attributes:
    """Of the answer, once it is complete."""
    return {
        "gen_ai.response.id": generation.completion_id,
        "gen_ai.response.finish_reasons": [generation.finish] if generation.finish else None,
        "gen_ai.usage.output_tokens": len(generation.ids),
        "gen_ai.usage.cache_read.input_tokens": generation.cached_tokens,
        "rl.server": generation.engine or None,
        "rl.policy.version": generation.versions[-1].version if generation.versions else None,
    }


def recorded_attributes(turn: Turn) -> Attributes:
    """Of the append to Redis."""
    return {
        "messaging.system": "redis",
        "messaging.operation.type": "send",
        "rl.turn.id": turn.turn_id,
        "rl.turn.relation": turn.relation,
        "rl.turn.finish": turn.finish,
        "rl.turn.train": turn.train,
        "rl.session.id": turn.session_id,
        "rl.group.id": turn.group_id,
        "rl.task.id": turn.task_id,
    }


logger = logging.getLogger(__name__)


class Recorder:
    """Appends turns to their sessions, even if no client waits for them any more."""

    def __init__(
        self,
        settings: GatewaySettings,
        renderer: ChatRenderer,
        writer: StreamWriter,
        metrics: Metrics,
        canary: CanaryWatch,
    ) -> None:
        self._settings = settings
        self._renderer = renderer
        self._writer = writer
        self._metrics = metrics
        self._canary = canary
        self._unfinished: set[asyncio.Task[None]] = set()

    async def record(self, generation: Generation) -> tuple[Turn, ParsedAnswer]:
        """Wait until a client reads the answer, then append the turn. It is in Redis when this returns.

        Raises StorageUnavailable when it cannot be stored, EngineFault when the engine's answer contradicts
        itself, StateConflict when the session has ended since, Deleted when it was deleted.
        """
        try:
            await generation.client.wait_for_reader()
        except asyncio.CancelledError:
            await self.record_aborted(generation)
            raise
        generation.recorded = True
        figures, began = generation.client.figures, clock.monotonic()
        answer = self._answer(generation)
        finish: Finish = "length" if generation.finish == "length" else "stop"
        if answer.tool_calls and finish == "stop":
            finish = "tool_calls"
        reply_digest = extend(generation.prompt.digest, reply_message(answer)).hex()
        if begun := generation.call.begun:
            answer = rest_of(answer, begun)
        was_parsed = figures.parse.since(began)
        try:
            with span("rl.record", "producer") as traced:
                generation.trace = traced.traceparent
                turn = generation.turn(self._settings.model_name, finish, reply_digest)
                if traced.recording:
                    traced.set(recorded_attributes(turn))
                await self._append_shielded(turn, generation)
        except InvalidRecord as error:
            raise EngineFault("nonsense", f"the engine's answer is broken: {error}") from error
        except SessionClosed as error:
            raise StateConflict(str(error), code="session_finished") from error
        finally:
            figures.record.since(was_parsed)
        if generation.trial is not None:
            prompt, ids = generation.prompt, generation.ids
            self._canary.answered(generation.trial, turn.versions, prompt.prompt_ids, ids, not prompt.images)
        return turn, answer

    async def record_aborted(self, generation: Generation) -> None:
        """Append an answer whose client left, as aborted, even if the caller is cancelled again."""
        generation.recorded = True
        await asyncio.shield(self._in_background(self._append_aborted(generation)))

    async def record_unrecorded(self, generations: Sequence[Generation]) -> None:
        """Record, as aborted, the choices of a stopped call that were complete but not recorded yet."""
        left = [each for each in generations if each.finish is not None and not each.recorded]
        await asyncio.gather(*map(self.record_aborted, left))

    async def close(self) -> None:
        """Wait for appends in the background."""
        await asyncio.gather(*self._unfinished, return_exceptions=True)

    async def _append_shielded(self, turn: Turn, generation: Generation) -> None:
        """Append; if the caller is cancelled meanwhile, append again in the background."""
        try:
            await self._append(turn, generation)
        except asyncio.CancelledError:
            self._in_background(self._append_again(turn, generation))
            raise

    async def _append_again(self, turn: Turn, generation: Generation) -> None:
        """Append once more; Redis stores a turn once, by its id. Nobody waits, so errors are only logged."""
        try:
            await self._append(turn, generation)
        except QueueError as error:
            logger.error("turn %s is not recorded: %s", turn.turn_id, error)

    async def _append_aborted(self, generation: Generation) -> None:
        try:
            turn = generation.turn(self._settings.model_name, "abort", "")
            await self._append(turn, generation)
        except QueueError as error:
            logger.warning("aborted turn %s is not recorded: %s", generation.turn_id, error)

    async def _append(self, turn: Turn, generation: Generation) -> None:
        started, head, images = clock.monotonic(), generation.head, generation.call.images
        spec, opening = head.spec, None if head.stored else head.spec
        with of_turn(turn.turn_id):
            turn = await self._writer.append_turn(
                turn, turn.finished_at + spec.ttl_s, spec.owner, opening, images
            )
        prompt_tokens = len(generation.prompt.prompt_ids)
        self._metrics.turn_recorded(
            turn, clock.monotonic() - started, prompt_tokens, generation.cached_tokens
        )

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start work for which `close` waits; its caller need not wait."""
        task = asyncio.create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return task

    def _answer(self, generation: Generation) -> ParsedAnswer:
        call, tokenizer = generation.call, self._renderer.tokenizer
        # A parser may need the template's own end, which tells whether a call is complete.
        ids = generation.ids
        if generation.end_id is not None and generation.end_id not in self._renderer.stop_ids:
            ids = ids[: generation.text_tokens]
        if generation.matched is not None:
            ids = before_stop(tokenizer, ids, generation.matched)
        if call.prompt_ids is not None:
            ended = bool(ids) and ids[-1] in (*self._renderer.stop_ids, *call.stop_ids)
            return ParsedAnswer(self._renderer.text_of(ids[:-1] if ended else ids))
        prompt_ids = generation.prompt.prompt_ids
        if begun := generation.prompt.begun:
            ids, prompt_ids = [*prompt_ids[-begun:], *ids], TokenIds(prompt_ids[:-begun])
        renderer = self._renderer.variant(call.thinking)
        if (plain := fast_parser(self._renderer).read(ids, prompt_ids)) is not None:
            return plain
        answer = renderer.parse(ids, call.tools, generation.turn_id, prompt_ids=prompt_ids)
        if answer.reasoning:
            generation.reasoning_tokens = tokens_of_thought(tokenizer, generation.ids, answer.reasoning)
        return answer
