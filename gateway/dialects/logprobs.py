"""Writes the log-probabilities of output tokens, as the engine returned them, in OpenAI's two shapes.

A long answer with many alternatives has hundreds of thousands of them. Encoding holds the interpreter's lock,
so each token is encoded by itself: other calls wait no longer than one token takes.
"""

from collections.abc import Sequence

from msgspec import Raw, Struct

from gateway.dialects.wire import encode
from gateway.generations.generation import Generation
from gateway.language.render import ChatRenderer
from gateway.language.tokenizer import GrowingText, named_bytes


class TopLogprob(Struct, frozen=True):
    """One token with its log-probability. `bytes` are those of its text, which may be parts of characters."""

    token: str
    bytes: tuple[int, ...]
    logprob: float


class TokenLogprob(Struct, frozen=True):
    """One sampled token, with the most probable tokens at its position.

    The `bytes` of all tokens, joined, are the text in UTF-8. The token that ended the answer has none.
    """

    token: str
    bytes: tuple[int, ...]
    logprob: float
    top_logprobs: Sequence[TopLogprob]


class CompletionLogprobs(Struct, frozen=True):
    """The four parallel lists of the completions contract, with one entry for each token."""

    tokens: Sequence[str]
    token_logprobs: Sequence[float]
    top_logprobs: Sequence[Raw] | None
    """JSON objects: log-probabilities by the text of their tokens."""
    text_offset: Sequence[int]


def logprobs_of(renderer: ChatRenderer, generation: Generation, tokens: range) -> list[Raw]:
    """The `TokenLogprob` of each of these output tokens, as JSON."""
    end = generation.text_tokens
    return [Raw(encode(_token_logprob(renderer, generation, index, end))) for index in tokens]


class TextOffsets:
    """Where the tokens of one choice begin in its text, in characters."""

    def __init__(self, renderer: ChatRenderer, generation: Generation, start: int) -> None:
        """`start` is where the text of the first token begins."""
        self._growing = GrowingText(renderer.tokenizer.token_bytes)
        self._generation = generation
        self._at = start

    def of(self, tokens: range) -> list[int]:
        """Where these tokens, the next ones, begin. A token inside a character begins with the character."""
        offsets, ids, end = [], self._generation.ids, self._generation.text_tokens
        for index in tokens:
            offsets.append(self._at)
            if index < end:
                self._at += len(self._growing.add(ids[index]))
        return offsets


def completion_logprobs(
    renderer: ChatRenderer, generation: Generation, tokens: range, offsets: Sequence[int]
) -> CompletionLogprobs:
    """The logprobs of these output tokens, whose text begins at `offsets`."""
    return CompletionLogprobs(
        [renderer.tokenizer.token_text(generation.ids[index])[0] for index in tokens],
        generation.logprobs[tokens.start : tokens.stop],
        [Raw(encode(_by_text(renderer, top))) for top in generation.top_logprobs[tokens.start : tokens.stop]]
        or None,
        offsets,
    )


def _by_text(renderer: ChatRenderer, top: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Log-probabilities by the text of their tokens. Of two tokens with the same text, such as a letter and
    the token of its byte, the less probable one is named by its bytes."""
    named: dict[str, float] = {}
    for logprob, token_id in top:
        text, data = renderer.tokenizer.token_text(token_id)
        named.setdefault(named_bytes(data) if text in named else text, logprob)
    return named


def _token_logprob(renderer: ChatRenderer, generation: Generation, index: int, end: int) -> TokenLogprob:
    """The logprob of one token; the text has the tokens before `end`."""
    tops = generation.top_logprobs[index] if generation.top_logprobs else ()
    text, data = renderer.tokenizer.token_text(generation.ids[index])
    return TokenLogprob(
        text,
        tuple(data) if index < end else (),
        generation.logprobs[index],
        [_top_logprob(renderer, token_id, logprob) for logprob, token_id in tops] if tops else (),
    )


def _top_logprob(renderer: ChatRenderer, token_id: int, logprob: float) -> TopLogprob:
    text, data = renderer.tokenizer.token_text(token_id)
    return TopLogprob(text, tuple(data), logprob)
