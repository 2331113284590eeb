"""Gives a `tokenizers` tokenizer the interface that the library `renderers` needs, without transformers."""

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE, Unigram

from gateway.language.control_tokens import ControlTokenEscaper, split_at_cuts

REASONING_TAGS = ("<think>", "</think>")
"""These are treated as control tokens even if the template uses neither."""
PHRASE_CHARS = 512
PASSAGE_CHARS = 65536
"""The longest phrase and the longest passage, in characters. The ids of 8192 phrases and 64 passages are
cached: every call repeats the short texts of the template and the agent's list of tools."""


class BareTokenizer:
    """Text to ids and back with the model's own tokenizer.json."""

    def __init__(self, model_path: Path, eos_token_id: int | None) -> None:
        self.backend = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        self.name_or_path = str(model_path)
        self.eos_token_id = eos_token_id
        self.unk_token_id: int | None = None
        self.vocabulary_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1
        self._added = self.backend.get_added_tokens_decoder()
        self._template_texts = set(REASONING_TAGS)
        self._recording = True
        """True until `control` is called: texts that are encoded until then belong to the template."""
        self.added_ids = frozenset(self._added)
        """Ids that were added to the vocabulary: control tokens such as `<|im_end|>` and `<tool_call>`, in
        some tokenizers also ordinary text."""
        self._phrases = lru_cache(8192)(self._ids)
        self._passages = lru_cache(64)(self._ids)

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        if self._recording:
            self._template_texts.add(text)
        if add_special_tokens or len(text) > PASSAGE_CHARS:
            return self._ids(text, add_special_tokens).tolist()
        cached = self._phrases if len(text) <= PHRASE_CHARS else self._passages
        return cached(text).tolist()

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def clear_caches(self) -> None:
        """Empty the caches, because the sessions with the cached texts may have been deleted."""
        self._phrases.cache_clear()
        self._passages.cache_clear()
        if isinstance(model := self.backend.model, BPE | Unigram):  # these cache words
            model._clear_cache()

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            if self._recording:
                self._template_texts.add(tokens)
            return self.backend.token_to_id(tokens)
        return [self.backend.token_to_id(token) for token in tokens]

    def control(self, written: Iterable[int]) -> ControlTokenEscaper:
        """Make the escaper of control tokens: special tokens, tokens that the template looked up when its
        renderer was made, and tokens among the ids `written` by the template around an example's messages.

        Other added tokens stay as they are: some tokenizers add ordinary text, such as blank lines and HTML.
        """
        self._recording = False
        between = frozenset(written)
        return ControlTokenEscaper(
            token.content
            for token_id, token in self._added.items()
            if token.special
            or token.content in self._template_texts
            or (token_id in between and token.content.strip())
        )

    def frame(self, stop_ids: Iterable[int]) -> ControlTokenEscaper:
        """Make the escaper of the tokens that no answer contains: stop tokens and special tokens."""
        stops = frozenset(stop_ids)
        return ControlTokenEscaper(
            t.content for index, t in self._added.items() if t.special or index in stops
        )

    def _ids(self, text: str, add_special_tokens: bool = False) -> "array[int]":
        ids = array("i")
        for part in split_at_cuts(text):
            try:
                encoding = self._encoding(part, add_special_tokens)
            except TypeError:  # half of a surrogate pair, which the JSON of a call may contain
                whole = part.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                encoding = self._encoding(whole, add_special_tokens)
            ids.extend(encoding.ids)
        return ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        # A batch, even of one text, releases the GIL; the fast variant computes no offsets.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
