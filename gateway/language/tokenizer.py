"""Gives a `tokenizers` tokenizer the interface that the library `renderers` needs, without transformers."""

import math
from array import array
from collections.abc import Iterable, Sequence, Set
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers.models import BPE, Unigram
from tokenizers.normalizers import NFC, NFD, NFKD

from gateway.counters import CountedCache, ThreadSeconds
from gateway.language.control_tokens import CUT, ControlTokenEscaper, split_at_cuts
from gateway.language.token_budget import BOUNDARY, BUDGET, PIECE_CHARS, SPLIT_SLACK, TokenBudget, runs
from gateway.language.token_bytes import TokenBytes
from gateway.language.tokenizer_files import named_tokens, tokenizer_of, tokenizer_settings
from rollout_queue import clock
from rollout_queue.base_model.tokenizer_check import tokenizer_check
from rollout_queue.protocol.model_checks import ModelCheck

REASONING_TAGS = ("<think>", "</think>")
"""The tokenizer treats these as control tokens, even if the template uses neither."""
PHRASE_CHARS = 512
PASSAGE_CHARS = 65536
"""The longest phrase and the longest passage, in characters. The ids of 8192 phrases and 64 passages are
cached: every call repeats the short texts of the template and the agent's list of tools."""
TOKEN_TEXTS = 32768
"""How many texts of single tokens are cached: 10 MB at most."""
PROBE = (
    "We met 12 people at 10 am; it was cold outside and 3 of them said 'we are here' to us.\n"
    "  def add(left, right):  # adds 2 numbers\n        return left + right if left else None\n\n"
    "Bonjour \u00e0 tous, na\u00efve caf\u00e9 e\u0301te 2024 winter \u4f60\u597d hello \u4e16\u754c and "
    "CamelCase words, I'm A b C d 7 e\n"
)
"""A text with many boundaries. If a cut there changes its ids, texts are encoded whole."""
NORMALIZED = 4
"""A normalizer such as NFC makes a text's UTF-8 less than this many times shorter."""


class BareTokenizer:
    """Text to ids and back with the model's own tokenizer.json."""

    def __init__(self, model_path: Path, eos_token_id: int | None) -> None:
        self.backend = tokenizer_of(model_path)
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
        self.special_ids = frozenset(token_id for token_id, token in self._added.items() if token.special)
        self._cuts_at_words = self._may_cut_at_words()
        self._frame = self._framed(tokenizer_settings(model_path))
        self.max_token_bytes = self._max_token_bytes()
        """No token stands for more bytes of text than this; infinite if that is not known."""
        self.spent = ThreadSeconds()
        self.phrases = CountedCache(self._ids, 8192)
        self.passages = CountedCache(self._ids, 64)
        self.bytes = TokenBytes(self.backend)
        self.token_text = lru_cache(TOKEN_TEXTS)(self.bytes.named)

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        if self._recording:
            self._template_texts.add(text)
        if add_special_tokens or len(text) > PASSAGE_CHARS:
            ids = self._ids(text, add_special_tokens)
        else:
            ids = (self.phrases if len(text) <= PHRASE_CHARS else self.passages).lookup(text)
        if (budget := BUDGET.get()) is not None:
            budget.spend(len(ids))
        return ids.tolist()

    def encode_alone(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a prompt that is a text: with `add_special_tokens`, as `AutoTokenizer` gives them.

        The begin token is not written twice, if the text has it already.
        """
        ids = self.encode(text.replace(CUT, CUT * 2))
        begin, end = self._frame
        if not add_special_tokens or not (begin or end):
            return ids
        begin = [] if ids[: len(begin)] == begin else begin
        end = [] if end and ids[-len(end) :] == end else end
        if (budget := BUDGET.get()) is not None:
            budget.spend(len(begin) + len(end))
        return [*begin, *ids, *end]

    def check(self) -> ModelCheck:
        """The row of the model's table about the ids of texts."""
        return tokenizer_check(self.encode_alone, [token.content for token in self._added.values()])

    def ends_check(self, stop_ids: Sequence[int], foreign: Set[int]) -> ModelCheck:
        """The row about the tokens that end an answer. The `foreign` ones are not the template's."""
        detail = ", ".join(self.token_text(each)[0] for each in stop_ids)
        if not foreign:
            return ModelCheck(check="end tokens", outcome="right", detail=detail)
        named = ", ".join(self.token_text(each)[0] for each in sorted(foreign))
        detail += f"; the model's files name {named}, and the chat template does not"
        return ModelCheck(check="end tokens", outcome="differs", detail=detail)

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id)[1]

    def clear_caches(self) -> None:
        """Empty the caches, because the sessions with the cached texts may have been deleted."""
        self.phrases.clear()
        self.passages.clear()
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

    def named(self, ids: Iterable[int]) -> ControlTokenEscaper:
        """Make the escaper of the tokens with these ids."""
        return ControlTokenEscaper(self._added[index].content for index in ids if index in self._added)

    def _ids(self, text: str, add_special_tokens: bool = False) -> "array[int]":
        ids, budget, began = array("i"), BUDGET.get(), clock.monotonic()
        try:
            for part in split_at_cuts(text):
                for run in runs(part, self._cuts_at_words):
                    if budget is not None:
                        if len(run) > PIECE_CHARS:
                            self._refuse_long(run, budget, len(ids))
                        budget.check(len(ids))
                    ids.extend(self._encoding(run, add_special_tokens).ids)
        finally:
            self.spent.seconds += clock.monotonic() - began
        return ids

    def _refuse_long(self, run: str, budget: TokenBudget, before: int) -> None:
        """Raise InvalidRequest if a text has more tokens than the budget allows after `before` others.

        The tokens are counted in pieces, because encoding the whole text takes memory for all of it.
        """
        for start in range(0, len(run), PIECE_CHARS):
            piece = self._encoding(run[start : start + PIECE_CHARS], False)
            before += max(0, len(piece) - SPLIT_SLACK)
            budget.check(before)

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        # A batch, even of one text, releases the GIL; the fast variant computes no offsets.
        encode = self.backend.encode_batch_fast
        try:
            return encode([text], add_special_tokens=add_special_tokens)[0]
        except TypeError:  # half of a surrogate pair, which the JSON of a call may contain
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return encode([whole], add_special_tokens=add_special_tokens)[0]

    def _framed(self, settings: dict[str, Any]) -> tuple[list[int], list[int]]:
        """The ids that go before and after a text that is encoded alone, such as the begin token.

        The post-processor of tokenizer.json says so; without one, `add_bos_token` of tokenizer_config.json.
        """
        framed = self.backend.encode("a", add_special_tokens=True)
        added = framed.special_tokens_mask
        start, stop = added.index(0) if 0 in added else len(added), len(added) - 1
        while stop >= start and added[stop]:
            stop -= 1
        begin, end = framed.ids[:start], framed.ids[stop + 1 :]
        begin_id = self.backend.token_to_id(named_tokens(settings).get("bos_token", ""))
        if not begin and settings.get("add_bos_token") is True and begin_id is not None:
            begin = [begin_id]
        return begin, end

    def _may_cut_at_words(self) -> bool:
        """Whether texts that are cut at every boundary between words are encoded as before."""
        if any(BOUNDARY.search(token.content) for token in self._added.values()):
            return False
        cuts = [0, *(found.start() for found in BOUNDARY.finditer(PROBE)), len(PROBE)]
        parts = [PROBE[start:end] for start, end in pairwise(cuts)]
        in_parts = [token_id for part in parts for token_id in self._encoding(part, False).ids]
        return bool(self._encoding(PROBE, False).ids == in_parts)

    def _max_token_bytes(self) -> float:
        model, normalizer = self.backend.model, self.backend.normalizer
        if getattr(model, "unk_token", None) and not getattr(model, "byte_fallback", False):
            return math.inf  # an unknown word of any length may be one token
        longest = max(len(token.encode()) for token in self.backend.get_vocab(with_added_tokens=True))
        if normalizer is None:
            return longest
        return NORMALIZED * longest if isinstance(normalizer, NFC | NFD | NFKD) else math.inf
