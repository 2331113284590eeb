"""`/v1/completions`: reads prompts of text or token ids, and writes their answers, whole or as a stream."""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from gateway.callers.identity import Caller, user_named
from gateway.dialects.base import ParsedRequest, RecordedAnswer
from gateway.dialects.body_decoding import decode_body
from gateway.dialects.completions_wire import CompletionChoice, CompletionRequest, TextCompletion
from gateway.dialects.fields import check_metadata
from gateway.dialects.logprobs import CompletionLogprobs, TextOffsets, completion_logprobs
from gateway.dialects.wire import (
    HEARTBEAT,
    Usage,
    check_sampling,
    encode,
    event,
    guided_form,
    sampling_of,
    stop_strings,
    usage_of,
)
from gateway.errors import InvalidRequest, invalid
from gateway.generations.generation import Call, Generation
from gateway.language.constraint import Constraint, constraint_of_text
from gateway.language.deltas import Delta
from gateway.language.render import ChatRenderer
from rollout_queue.contract.packed_tokens import TokenIds
from rollout_queue.http.errors import ApiError
from rollout_queue.http.json_routes import worked

MAX_ANSWERS = 128
"""Limit on the answers of one request: its prompts times `n`."""


class Completions:
    """The dialect of `/v1/completions`."""

    prefix = "cmpl-"

    def __init__(self, renderer: ChatRenderer, model_name: str) -> None:
        self._renderer = renderer
        self._model_name = model_name

    async def read(self, caller: Caller, body: bytes, heavy: bool) -> ParsedRequest:
        context_length = self._renderer.context_length
        request = await worked(caller.payer, body, decode_body, body, CompletionRequest, context_length)
        check(request)
        vocab_size = self._renderer.config.vocab_size
        asked = sampling_of(request, vocab_size)
        if request.max_tokens is not None:
            asked["max_tokens"] = request.max_tokens
        constraint = await worked(caller.payer, body, _constraint_of, request, vocab_size)
        prompts, special = prompts_of(request), request.add_special_tokens is not False
        if heavy:
            ids = await asyncio.to_thread(_ids_of, self._renderer, prompts, special)
        else:
            ids = _ids_of(self._renderer, prompts, special)
        calls = [
            Call(
                messages=(),
                asked=asked | constraint.asked,
                structural_tag=constraint.structural_tag,
                stop=stop_strings(request.stop),
                stream=bool(request.stream),
                top_logprobs=request.logprobs or 0,
                prompt_ids=prompt_ids,
                user=user_named(request.user),
            )
            for prompt_ids in ids
        ]
        return ParsedRequest(
            calls=calls,
            responder=CompletionsResponder(self._renderer, request, request.model or self._model_name),
            n=request.n or 1,
            stream=bool(request.stream),
            model=request.model,
            metadata=request.metadata,
        )

    def error(self, error: ApiError) -> bytes:
        return encode(error.body)


def check(request: CompletionRequest) -> None:
    """Raises InvalidRequest for a value that the contract forbids or that this gateway does not support."""
    check_sampling(request)
    check_metadata(request.metadata)
    if request.best_of not in (None, request.n or 1):
        raise invalid("best_of", "every sample is returned, so best_of must equal n")
    if request.suffix:
        raise invalid("suffix", "this model cannot insert text before a suffix")
    if request.logprobs is not None and not 0 <= request.logprobs <= 20:
        raise invalid("logprobs", f"{request.logprobs} is not within 0 and 20")
    if request.echo and request.logprobs is not None:
        raise InvalidRequest("echo with logprobs: only sampled tokens have logprobs here", param="echo")


def prompts_of(request: CompletionRequest) -> list[str] | list[list[int]]:
    """The prompts as a list. Raises InvalidRequest for no prompt, too many, or an id outside [0, 2**31)."""
    prompt = request.prompt
    if prompt is None or prompt == [] or prompt == "":
        raise invalid("prompt", "give text or token ids")
    if isinstance(prompt, str):
        return [prompt]
    prompts: list[Any] = [prompt] if isinstance(prompt[0], int) else prompt
    if len(prompts) * (request.n or 1) > MAX_ANSWERS:
        raise invalid("prompt", f"at most {MAX_ANSWERS} answers in one call")
    for each in prompts:
        if not isinstance(each, str | list) or (isinstance(each, list) and not all(map(_is_id, each))):
            raise invalid("prompt", "text, token ids, or a list of either")
    return prompts


def _constraint_of(request: CompletionRequest, vocab_size: int) -> Constraint:
    form, param = guided_form(request)
    return Constraint() if form is None else constraint_of_text(form, param, vocab_size)


def _ids_of(renderer: ChatRenderer, prompts: Sequence[str | list[int]], special: bool) -> list[TokenIds]:
    ids = []
    for prompt in prompts:
        if isinstance(prompt, str):
            renderer.refuse_too_long([{"role": "user", "content": prompt}], "prompt")
            with renderer.bounded("prompt"):
                prompt = renderer.tokenizer.encode_alone(prompt, special)
        ids.append(TokenIds(prompt))
    return ids


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**31


class CompletionsResponder:
    """Writes the reply to one request."""

    def __init__(self, renderer: ChatRenderer, request: CompletionRequest, model: str) -> None:
        self.renderer = renderer
        self.request = request
        self._model = model

    def body(self, recorded: Sequence[RecordedAnswer]) -> bytes:
        generations = [each.generation for each in recorded]
        choices = [self._choice(index, each) for index, each in enumerate(recorded)]
        usage = usage_of(generations, self.request.n or 1)
        return encode(self.completion(generations[0], choices, usage, self.prompt_ids(generations[0])))

    def events(self, generations: Sequence[Generation]) -> "CompletionsEvents":
        return CompletionsEvents(self, generations)

    def completion(
        self,
        first: Generation,
        choices: Sequence[CompletionChoice],
        usage: Usage | UnsetType = UNSET,
        prompt_ids: list[int] | UnsetType = UNSET,
    ) -> TextCompletion:
        return TextCompletion(
            id=first.completion_id,
            created=int(first.started_at),
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_ids,
        )

    def echo(self, index: int, generation: Generation) -> str:
        """The prompt's text if the request asks for `echo`, otherwise an empty string."""
        if not self.request.echo:
            return ""
        prompt = prompts_of(self.request)[index // (self.request.n or 1)]
        return prompt if isinstance(prompt, str) else self.renderer.text_of(generation.prompt.prompt_ids)

    def prompt_ids(self, generation: Generation) -> list[int] | UnsetType:
        return generation.prompt.prompt_ids.tolist() if self.request.return_token_ids else UNSET

    def output_ids(self, generation: Generation) -> list[int] | UnsetType:
        return generation.ids if self.request.return_token_ids else UNSET

    def _choice(self, index: int, recorded: RecordedAnswer) -> CompletionChoice:
        generation, turn, answer = recorded
        echo = self.echo(index, generation)
        text, logprobs = echo + answer.content, None
        if self.request.logprobs is not None:
            tokens, begins = range(len(generation.ids)), TextOffsets(self.renderer, generation, len(echo))
            offsets = [min(begin, len(text)) for begin in begins.of(tokens)]
            logprobs = completion_logprobs(self.renderer, generation, tokens, offsets)
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=turn.finish,
            token_ids=self.output_ids(generation),
            prompt_token_ids=self.prompt_ids(generation),
        )


class CompletionsEvents:
    """The chunks of one streamed reply."""

    heartbeat = HEARTBEAT

    def __init__(self, responder: CompletionsResponder, generations: Sequence[Generation]) -> None:
        self._responder = responder
        self._generations = generations
        self._choices = [_StreamedTokens(responder.renderer, generation) for generation in generations]

    def opening(self) -> bytes:
        if not self._responder.request.echo:
            return b""
        return b"".join(
            self._chunk(CompletionChoice(index=index, text=self._responder.echo(index, generation)))
            for index, generation in enumerate(self._generations)
        )

    def piece(self, index: int, deltas: Sequence[Delta], tokens: range) -> bytes:
        text, choice = "".join([delta.content for delta in deltas]), self._choices[index]
        logprobs = None
        if self._responder.request.logprobs is not None:
            logprobs = self._logprobs(index, *choice.sendable(len(text), tokens))
        if not (text or logprobs):
            return b""
        return self._chunk(CompletionChoice(index=index, text=text, logprobs=logprobs))

    def closing(self, index: int, recorded: RecordedAnswer) -> bytes:
        generation, turn, answer = recorded
        logprobs = None
        if self._responder.request.logprobs is not None:
            logprobs = self._logprobs(index, *self._choices[index].rest(len(answer.content)))
        ids = self._responder.output_ids(generation)
        choice = CompletionChoice(
            index=index, text="", logprobs=logprobs, finish_reason=turn.finish, token_ids=ids
        )
        return self._chunk(choice, self._responder.prompt_ids(generation))

    def _logprobs(self, index: int, tokens: range, offsets: Sequence[int]) -> CompletionLogprobs | None:
        generation = self._generations[index]
        return completion_logprobs(self._responder.renderer, generation, tokens, offsets) if tokens else None

    def ending(self) -> bytes:
        options, done = self._responder.request.stream_options, b"data: [DONE]\n\n"
        if not (options and options.include_usage):
            return done
        usage = usage_of(self._generations, self._responder.request.n or 1)
        return event(encode(self._responder.completion(self._generations[0], (), usage))) + done

    def failing(self, error: ApiError) -> bytes:
        return event(encode(error.body))

    def _chunk(self, choice: CompletionChoice, prompt_ids: list[int] | UnsetType = UNSET) -> bytes:
        completion = self._responder.completion(self._generations[0], (choice,), prompt_ids=prompt_ids)
        return event(encode(completion))


class _StreamedTokens:
    """The tokens of one choice. Their logprobs are sent with their text: it is held back where it may be the
    beginning of a stop string, and then their offsets may be behind the end of the text."""

    def __init__(self, renderer: ChatRenderer, generation: Generation) -> None:
        self._begins = TextOffsets(renderer, generation, 0)
        self._offsets: list[int] = []
        self._covered = 0
        self._sent = 0
        """Characters of text."""

    def sendable(self, characters: int, tokens: range) -> tuple[range, list[int]]:
        """With so many more characters, and these tokens: the tokens whose text was sent, or comes next."""
        self._sent += characters
        self._offsets += self._begins.of(tokens)
        return self._until(bisect_right(self._offsets, self._sent))

    def rest(self, characters: int) -> tuple[range, list[int]]:
        """The tokens that were not sent, if the text has so many characters."""
        self._offsets = [min(offset, characters) for offset in self._offsets]
        return self._until(len(self._offsets))

    def _until(self, end: int) -> tuple[range, list[int]]:
        start, self._covered = self._covered, max(self._covered, end)
        return range(start, self._covered), self._offsets[start : self._covered]
