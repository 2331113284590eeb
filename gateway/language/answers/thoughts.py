"""Counts the tokens of an answer's thought, for `usage`."""

from collections.abc import Sequence
from functools import partial

from gateway.language.token_bytes import text_and_ends
from gateway.language.tokenizer import BareTokenizer


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
