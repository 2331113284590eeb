"""Begins and samples generations.

call ──begin──▶ parent, prompt, sampling ──sample──▶ pieces …
"""

import asyncio
from collections.abc import Sequence

from gateway.conversations.conversation import Prompt, locate
from gateway.conversations.raw import locate_raw
from gateway.engines.failover import Hear, Sampler, SampleRequest
from gateway.engines.stream import Piece
from gateway.errors import GatewayError, InvalidRequest
from gateway.generations.generation import Call, ClientCall, Generation
from gateway.generations.recorder import Recorder
from gateway.generations.sampling import decide, engine_parameters
from gateway.language.render import UNREADABLE, ChatRenderer, Message, Tool
from gateway.settings import GatewaySettings
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.ids import new_id
from rollout_queue.contract.tokens import TokenIds

WHOLE_ANSWER_INTERVAL = 64
"""Tokens per engine event for a client that waits for the whole answer."""


class Generator:
    """What the dialects share between understanding a request and telling its answer."""

    def __init__(
        self, settings: GatewaySettings, renderer: ChatRenderer, sampler: Sampler, recorder: Recorder
    ) -> None:
        self._renderer = renderer
        self._sampler = sampler
        self._recorder = recorder
        self._knows_every_id = renderer.tokenizer.vocabulary_size <= renderer.config.vocab_size
        self._train_constrained = settings.train_constrained
        self._context_length = settings.context_length or renderer.config.max_position_embeddings

    async def begin(
        self,
        head: SessionHead,
        calls: Sequence[Call],
        n: int,
        version: int | None,
        prefix: str,
        heavy: bool,
        client: ClientCall,
    ) -> list[Generation]:
        """Find each call's place and its sampling, for `n` answers to each; heavy ones off the event loop.

        Raises InvalidRequest for what cannot be rendered or does not fit.
        """
        completion_id = f"{prefix}{new_id()}"
        generations: list[Generation] = []
        for call in calls:
            if heavy:
                prompt = await asyncio.to_thread(self._place, head, call)
            else:
                prompt = self._place(head, call)
            room = self._context_length - len(prompt.prompt_ids)
            train = head.spec.train and (self._train_constrained or not call.constraint)
            for index in range(len(generations), len(generations) + n):
                sampling = decide(head.spec.sampling, call, room, head.spec.train, index)
                generations.append(
                    Generation(call, head, prompt, sampling, completion_id, client, index, train, version)
                )
        return generations

    def prompt_ids(self, messages: Sequence[Message], tools: list[Tool] | None) -> TokenIds:
        """The prompt of messages that continue nothing. Raises InvalidRequest for what cannot be rendered."""
        try:
            return self._renderer.render(messages, tools)
        except UNREADABLE as error:
            raise _unreadable(error) from error

    async def sample(self, generation: Generation, hear: Hear | None = None) -> None:
        """Sample the whole answer; `hear` has each piece once it is taken.

        A caller that is cancelled, or a `hear` that fails, ends the engine's work, and that is recorded.
        """

        async def take(piece: Piece) -> None:
            generation.take(piece)
            if hear is not None:
                await hear(piece)

        try:
            await self._sampler.sample(self._asked(generation), take)
        except GatewayError:
            raise
        except BaseException:
            await self._recorder.record_aborted(generation)
            raise

    def _asked(self, generation: Generation) -> SampleRequest:
        call = generation.call
        return SampleRequest(
            rid=generation.turn_id,
            session_id=generation.head.spec.session_id,
            version=generation.version,
            input_ids=generation.prompt.prompt_ids.tolist(),
            parameters=engine_parameters(generation.sampling, self._renderer.stop_ids, call),
            stream_interval=1 if call.stream else WHOLE_ANSWER_INTERVAL,
            top_logprobs=call.top_logprobs,
        )

    def _place(self, head: SessionHead, call: Call) -> Prompt:
        """Raises InvalidRequest."""
        try:
            if call.prompt_ids is not None:
                prompt = locate_raw(head, call.prompt_ids)
            else:
                prompt = locate(self._renderer, head, call.messages, call.tools)
        except UNREADABLE as error:
            raise _unreadable(error) from error
        ids, context, vocabulary = prompt.prompt_ids, self._context_length, self._renderer.config.vocab_size
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if len(ids) >= context:
            message = f"the prompt has {len(ids)} tokens; the context holds {context}, the answer included"
            raise InvalidRequest(message, param="messages", code="context_length_exceeded")
        foreign = not self._knows_every_id or call.prompt_ids is not None  # what we encode is known, then
        if foreign and not (ids.natural and max(ids) < vocabulary):  # one such id kills an SGLang engine
            message = f"a token id lies outside the vocabulary of {vocabulary}"
            raise InvalidRequest(message, param="messages", code="token_out_of_vocabulary")
        return prompt


def _unreadable(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"the messages cannot be rendered: {error}", param="messages")
