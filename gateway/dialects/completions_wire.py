"""The objects of OpenAI's completions contract: choices of text, logprobs, and the chunks of a stream."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.dialects.base import Answered
from gateway.dialects.wire import HEARTBEAT, event, usage_of
from gateway.generations.generation import Generation
from gateway.language.deltas import Delta
from gateway.language.render import ChatRenderer
from rollout_queue.http.errors import ApiError

if TYPE_CHECKING:
    from gateway.dialects.completions import CompletionRequest

_encode = msgspec.json.Encoder().encode


class CompletionsTelling:
    """How one request wants to be answered."""

    def __init__(self, renderer: ChatRenderer, body: "CompletionRequest", model: str) -> None:
        self.renderer = renderer
        self.body = body
        self._model = model

    def plain(self, answered: Sequence[Answered]) -> bytes:
        generations = [each.generation for each in answered]
        choices = []
        for index, (generation, turn, answer) in enumerate(answered):
            choice = self.choice(index, self.echoed(generation) + answer.content, turn.finish)
            choice["logprobs"], _ = self.logprobs(generation, 0, len(self.echoed(generation)))
            if self.body.return_token_ids:
                choice["token_ids"] = generation.ids
                choice["prompt_token_ids"] = generation.prompt.prompt_ids.tolist()
            choices.append(choice)
        reply = {
            **self.envelope(generations[0]),
            "choices": choices,
            "usage": usage_of(generations, self.body.n or 1),
        }
        if self.body.return_token_ids:
            reply["prompt_token_ids"] = generations[0].prompt.prompt_ids.tolist()
        return _encode(reply)

    def events(self, generations: Sequence[Generation]) -> "CompletionsEvents":
        return CompletionsEvents(self, generations)

    def envelope(self, first: Generation) -> dict[str, Any]:
        return {
            "id": first.completion_id,
            "object": "text_completion",
            "created": int(first.started_at),
            "model": self._model,
        }

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def echoed(self, generation: Generation) -> str:
        return self.renderer.text_of(generation.prompt.prompt_ids) if self.body.echo else ""

    def logprobs(self, generation: Generation, start: int, offset: int) -> tuple[dict[str, Any] | None, int]:
        """OpenAI's four lists, of the output tokens from `start` on, whose text begins at `offset`; and where
        it ends."""
        if self.body.logprobs is None:
            return None, offset
        text_of = self.renderer.text_of
        tokens = [text_of([token_id]) for token_id in generation.ids[start:]]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        tops = generation.top_logprobs
        return {
            "tokens": tokens,
            "token_logprobs": generation.logprobs[start:],
            "top_logprobs": [{text_of([token]): lp for lp, token in top} for top in tops[start:]] or None,
            "text_offset": offsets,
        }, offset


class CompletionsEvents:
    """The chunks of one streamed reply."""

    heartbeat = HEARTBEAT

    def __init__(self, telling: CompletionsTelling, generations: Sequence[Generation]) -> None:
        self._telling = telling
        self._generations = generations
        self._offsets = [0] * len(generations)
        """Where the next token's text begins, by choice."""

    def opening(self) -> bytes:
        if not self._telling.body.echo:
            return b""
        return b"".join(
            self._chunk(index, self._telling.echoed(generation))
            for index, generation in enumerate(self._generations)
        )

    def piece(self, index: int, deltas: Sequence[Delta], start: int) -> bytes:
        text = "".join([delta.content for delta in deltas])
        generation = self._generations[index]
        logprobs = None
        if start < len(generation.ids):
            logprobs, self._offsets[index] = self._telling.logprobs(generation, start, self._offsets[index])
        return self._chunk(index, text, logprobs=logprobs) if text or logprobs else b""

    def closing(self, index: int, answered: Answered) -> bytes:
        generation, turn, _ = answered
        ids: dict[str, Any] = {}
        more: dict[str, Any] = {}
        if self._telling.body.return_token_ids:
            ids["token_ids"] = generation.ids
            more["prompt_token_ids"] = generation.prompt.prompt_ids.tolist()
        return self._chunk(index, "", turn.finish, more, **ids)

    def ending(self) -> bytes:
        options, done = self._telling.body.stream_options, b"data: [DONE]\n\n"
        if not (options and options.include_usage):
            return done
        usage = usage_of(self._generations, self._telling.body.n or 1)
        return self._event({"choices": [], "usage": usage}) + done

    def failing(self, error: ApiError) -> bytes:
        return event(_encode(error.body))

    def _chunk(
        self,
        index: int,
        text: str,
        finish: str | None = None,
        more: dict[str, Any] | None = None,
        **choice: Any,
    ) -> bytes:
        return self._event({"choices": [self._telling.choice(index, text, finish) | choice], **(more or {})})

    def _event(self, fields: dict[str, Any]) -> bytes:
        return event(_encode({**self._telling.envelope(self._generations[0]), **fields}))
