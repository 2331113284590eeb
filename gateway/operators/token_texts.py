"""The text of each token of a sequence, for people who look at single tokens.

Several tokens may make one character together. Then the first of them has the character, and the others have
None: they have no text of their own.
"""

from collections.abc import Sequence

from tokenizers import decoders

from gateway.language.answers.partial_parse import markup_of
from gateway.language.answers.streamed_text import LONGEST_CHARACTER, IncrementalDetokenizer
from gateway.language.render import ChatRenderer
from rollout_queue.contract.tokens import TokenIds

LEAD = 2 * LONGEST_CHARACTER


def token_texts(renderer: ChatRenderer, ids: Sequence[int]) -> list[str | None]:
    """One text for each id; without the Nones they are the text of all ids together."""
    backend = renderer.tokenizer.backend
    decoder = IncrementalDetokenizer(backend, markup_of(renderer).byte_ids)
    alone = isinstance(backend.decoder, decoders.ByteLevel)  # then a token's bytes are the same everywhere
    texts: list[str | None] = []
    for each in ids:
        if alone and not decoder.held:
            text, data = renderer.tokenizer.token_text(each)
            if text.encode() == data:
                texts.append(text)
                continue
        before = len(decoder.held) + 1
        text = decoder.step([each])
        if released := before - len(decoder.held):
            texts += [text, *[None] * (released - 1)]
    if rest := decoder.held:
        whole, known = renderer.text_of(ids), "".join(text for text in texts if text is not None)
        texts += [whole[len(known) :], *[None] * (len(rest) - 1)]
    return texts


def texts_in(renderer: ChatRenderer, ids: TokenIds, part: slice) -> list[str | None]:
    """The texts of a part of a sequence. More tokens on both sides are decoded, since a character may lie
    across the edge of the part."""
    start, end, _ = part.indices(len(ids))
    first = max(0, start - LEAD)
    return token_texts(renderer, ids[first : end + LEAD].tolist())[start - first : end - first]
