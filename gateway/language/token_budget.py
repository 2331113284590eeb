"""Bounds what one prompt may cost: a text with far too many tokens is refused before it is encoded whole."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from gateway.errors import InvalidRequest

PIECE_CHARS: Final = 32 * 2**10
"""Longer texts are encoded in pieces, so that no encoding takes much memory."""
BOUNDARY: Final = re.compile(r"(?<=[A-Za-z0-9]) (?=[A-Za-z])")
"""Where a text may be cut: before a space between words. Most tokenizers split texts there themselves."""
SPLIT_SLACK = 16
"""How many tokens a cut within a word may add."""


@dataclass
class TokenBudget:
    """How many tokens the prompt that is being encoded may still have."""

    limit: int
    context: int
    param: str
    spent: int = 0
    cuts: int = 0
    """Where texts are cut: each cut ends a token."""

    def cut(self) -> None:
        """Count a cut. Raises InvalidRequest if the prompt has more of them than it may have tokens."""
        self.cuts += 1
        if self.cuts > self.limit:
            raise too_long(self.limit, self.context, self.param)

    def check(self, more: int) -> None:
        """Raises InvalidRequest if the prompt and `more` tokens exceed the limit."""
        if self.spent + more > self.limit:
            raise too_long(self.limit, self.context, self.param)

    def spend(self, tokens: int) -> None:
        """Count tokens of the prompt. Raises as `check`."""
        self.check(tokens)
        self.spent += tokens


BUDGET: ContextVar[TokenBudget | None] = ContextVar("BUDGET", default=None)
"""The budget of the prompt that this thread encodes; None: no limit."""


@contextmanager
def at_most(limit: int, context: int, param: str) -> Iterator[None]:
    """Let all texts that are encoded in the block have at most `limit` tokens together."""
    former = BUDGET.set(TokenBudget(limit, context, param))
    try:
        yield
    finally:
        BUDGET.reset(former)


def too_long(limit: int, context: int, param: str) -> InvalidRequest:
    message = f"the prompt has more than {limit} tokens; the context holds {context}, the answer included"
    return InvalidRequest(message, param=param, code="context_length_exceeded")


def runs(text: str, at_boundaries: bool) -> Iterator[str]:
    """The text in parts of about `PIECE_CHARS` characters. Encoded one by one, they give the same tokens.

    A part without a boundary may be longer. Without `at_boundaries`, the whole text is one part.
    """
    start = 0
    while at_boundaries and len(text) - start > PIECE_CHARS:
        end = _boundary(text, start + PIECE_CHARS // 2)
        yield text[start:end]
        start = end
    yield text[start:]


def _boundary(text: str, start: int) -> int:
    # Searched in windows: one search holds the interpreter's lock until it ends.
    for at in range(start, len(text), PIECE_CHARS):
        if (found := BOUNDARY.search(text, at, at + PIECE_CHARS + 1)) is not None:
            return found.start()
    return len(text)


def text_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """The characters of all texts that every template renders: those of all roles but the assistant."""
    return sum(_chars(message.get("content")) for message in messages if message.get("role") != "assistant")


def _chars(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, Mapping):
        text = content.get("text")
        return len(text) if isinstance(text, str) else 0
    return sum(map(_chars, content)) if isinstance(content, list | tuple) else 0
