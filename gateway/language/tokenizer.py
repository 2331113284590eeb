"""A bare `tokenizers` tokenizer in the shape that `renderers` asks for: no transformers, no torch."""

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE, Unigram

from gateway.language.control_tokens import ControlTokenEscaper, split_at_cuts

THOUGHTS = ("<think>", "</think>")
"""Marks that open and close a thought, also where a template asks for neither."""
PHRASE_CHARS = 512
PASSAGE_CHARS = 65536
"""Templates repeat their short texts in every call, and an agent its list of tools: the ids of 8192 phrases
and 64 passages are remembered."""


class BareTokenizer:
    """Text to ids and back with the model's own tokenizer.json."""

    def __init__(self, model_path: Path, eos_token_id: int | None) -> None:
        self.backend = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        self.name_or_path = str(model_path)
        self.eos_token_id = eos_token_id
        self.unk_token_id: int | None = None
        self.vocabulary_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1
        self._added = self.backend.get_added_tokens_decoder()
        self._asked = set(THOUGHTS)
        self._listening = True
        self.added_ids = frozenset(self._added)
        """Ids of control tokens: `<|im_end|>`, `<tool_call>` and the like, never ordinary text."""
        self._phrases = lru_cache(8192)(self._ids)
        self._passages = lru_cache(64)(self._ids)

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        if self._listening:
            self._asked.add(text)
        if add_special_tokens or len(text) > PASSAGE_CHARS:
            return self._ids(text, add_special_tokens).tolist()
        remembered = self._phrases if len(text) <= PHRASE_CHARS else self._passages
        return remembered(text).tolist()

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def forget(self) -> None:
        """Remember nothing that was encoded: it may be what somebody has deleted."""
        self._phrases.cache_clear()
        self._passages.cache_clear()
        if isinstance(model := self.backend.model, BPE | Unigram):  # they remember words
            model._clear_cache()

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            if self._listening:
                self._asked.add(tokens)
            return self.backend.token_to_id(tokens)
        return [self.backend.token_to_id(token) for token in tokens]

    def control(self, written: Iterable[int]) -> ControlTokenEscaper:
        """The tokens that control: the special ones, those that the template asked for when it was made, and
        the `written` ones that it puts between messages.

        Some tokenizers add ordinary text as tokens too, such as blank lines and HTML tags.
        """
        self._listening = False
        seen = frozenset(written)
        return ControlTokenEscaper(
            token.content
            for token_id, token in self._added.items()
            if token.special or token.content in self._asked or (token_id in seen and token.content.strip())
        )

    def frame(self, stop_ids: Iterable[int]) -> ControlTokenEscaper:
        """The tokens that no answer contains: those that end one, and the special ones."""
        stops = frozenset(stop_ids)
        return ControlTokenEscaper(
            t.content for index, t in self._added.items() if t.special or index in stops
        )

    def _ids(self, text: str, add_special_tokens: bool = False) -> "array[int]":
        ids = array("i")
        for piece in split_at_cuts(text):
            try:
                encoding = self._encoding(piece, add_special_tokens)
            except TypeError:  # half of a surrogate pair, as the JSON of a call may spell one
                whole = piece.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                encoding = self._encoding(whole, add_special_tokens)
            ids.extend(encoding.ids)
        return ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        # A batch, though of one, lets other threads run meanwhile; and a fast one leaves out the offsets.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
