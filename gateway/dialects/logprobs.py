"""Writes the log-probabilities of output tokens, as the engine returned them, in OpenAI's two shapes.

A long answer with many alternatives has hundreds of thousands of them. Encoding holds the interpreter's lock,
so each token is encoded by itself: other calls wait no longer than one token takes.
"""

from collections.abc import Sequence

from msgspec import Raw, Struct

from gateway.dialects.wire import encode
from gateway.generations.generation import Generation
from gateway.language.render import ChatRenderer


class TopLogprob(Struct, frozen=True):
    """One token with its log-probability; `bytes` are those of its UTF-8 text."""

    token: str
    bytes: tuple[int, ...]
    logprob: float


class TokenLogprob(Struct, frozen=True):
    """One sampled token, with the most probable tokens at its position."""

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
    return [Raw(encode(_token_logprob(renderer, generation, index))) for index in tokens]


def completion_logprobs(
    renderer: ChatRenderer, generation: Generation, tokens: range, offset: int
) -> tuple[CompletionLogprobs, int]:
    """The logprobs of these output tokens, and the offset at which their text ends.

    `offset` is where their text begins. Both offsets count characters of the choice's whole text.
    """
    texts = [renderer.tokenizer.token_text(generation.ids[index])[0] for index in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = [
        Raw(encode({renderer.tokenizer.token_text(token)[0]: logprob for logprob, token in top}))
        for top in generation.top_logprobs[tokens.start : tokens.stop]
    ]
    logprobs = generation.logprobs[tokens.start : tokens.stop]
    return CompletionLogprobs(texts, logprobs, tops or None, offsets), offset


def _token_logprob(renderer: ChatRenderer, generation: Generation, index: int) -> TokenLogprob:
    tops = generation.top_logprobs[index] if generation.top_logprobs else ()
    return TokenLogprob(
        *renderer.tokenizer.token_text(generation.ids[index]),
        generation.logprobs[index],
        [TopLogprob(*renderer.tokenizer.token_text(token), logprob) for logprob, token in tops],
    )
