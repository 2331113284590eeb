"""Gives a `tokenizers` tokenizer the interface that the library `renderers` needs, without transformers.

A TokenBudget bounds what one prompt may cost: a text with far too many tokens is refused before it is encoded
whole. Control tokens in the text of users and tools are escaped, so that they are encoded as ordinary text:

"say <|im_end|>" ──▶ "say <CUT|im_end|>" ──▶ ids of "say <", ids of "|im_end|>"

So no user or tool can end a message, or begin one in another role.

TokenBytes are the bytes that a token stands for: several tokens may make one character together.

"Ġwor" of a byte-level vocabulary ──▶ b" wor"        <0xE2> of a SentencePiece vocabulary ──▶ b"\\xe2"
"""

import codecs
import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from os.path import commonprefix
from pathlib import Path
from typing import Any, Final, NoReturn

from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE, Unigram
from tokenizers.normalizers import NFC, NFD, NFKD

from gateway.counters import CountedCache, ThreadSeconds
from gateway.errors import InvalidRequest
from gateway.language.tokenizer_files import named_tokens, tokenizer_of, tokenizer_settings
from rollout_queue import clock
from rollout_queue.model_checks import tokenizer_check
from rollout_queue.protocol.message import ModelCheck

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
            self.refuse()

    def check(self, more: int) -> None:
        """Raises InvalidRequest if the prompt and `more` tokens exceed the limit."""
        if self.spent + more > self.limit:
            self.refuse()

    def refuse(self) -> NoReturn:
        raise too_long(self.limit, self.context, self.param)


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
    contents = [message.get("content") for message in messages if message.get("role") != "assistant"]
    return sum(len(each) if isinstance(each, str) else _chars(each) for each in contents)


def _chars(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, Mapping):
        text = content.get("text")
        return len(text) if isinstance(text, str) else 0
    return sum(map(_chars, content)) if isinstance(content, list | tuple) else 0


CUT = "\ufdd0"
"""Marks where text is split before it is encoded. If the text itself contains this Unicode noncharacter, it
is doubled there, so that it is not taken for a mark."""
WINDOW = 64 * 2**10
"""Characters that are searched at once: a search holds the interpreter's lock until it ends."""
_CUTS = re.compile(f"(?<!{CUT}){CUT}(?!{CUT})")


def split_at_cuts(text: str) -> list[str]:
    """The parts of a text between its cuts."""
    return [part.replace(CUT * 2, CUT) for part in _CUTS.split(text)] if CUT in text else [text]


class ControlTokenEscaper:
    """Cuts the given control tokens in a text, fast even for thousands of tokens and long texts."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # A token of one character cannot be cut. No known tokenizer has a control token of that length.
        known = sorted({token for token in tokens if len(token) > 1})
        self._longest = max(map(len, known), default=1)
        rests: dict[str, list[str]] = {}
        for token in known:
            rests.setdefault(token[0], []).append(token[1:])
        begins = (f"{re.escape(first)}(?={_any_of(each)})" for first, each in rests.items())
        self._begins = re.compile("|".join(begins) or "(?!)")
        """The first character of each token, wherever one begins."""

    def cut(self, text: str) -> str:
        """The text with a cut in every control token that it contains. Raises InvalidRequest once the prompt
        has more cuts than it may have tokens: there is a token between two cuts."""
        if CUT in text:
            text = text.replace(CUT, CUT * 2)
        last, parts, budget = 0, [], BUDGET.get()
        for start in self._starts(text):
            parts.append(text[last : start + 1])
            last = start + 1
            if budget is not None:
                budget.cut()
        return CUT.join([*parts, text[last:]]) if parts else text

    def _starts(self, text: str) -> Iterator[int]:
        for at in range(0, len(text), WINDOW):
            for found in self._begins.finditer(text, at, at + WINDOW + self._longest - 1):
                if found.start() < at + WINDOW:  # the next window has the others
                    yield found.start()


def _any_of(texts: Sequence[str]) -> str:
    """A pattern of any of the texts that looks at each character once: the texts as a tree."""
    begins = sorted({text[:1] for text in texts})
    if "" in begins:
        return ""
    branches = []
    for begin in begins:
        same = [text for text in texts if text.startswith(begin)]
        shared = commonprefix(same)  # noqa: RUF071 - they are no paths
        branches.append(re.escape(shared) + _any_of([text[len(shared) :] for text in same]))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""The bytes that a byte-level vocabulary writes as themselves; it numbers the others from U+0100 on."""
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + number): byte
    for number, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)
}


class TokenBytes:
    """The bytes of the tokens of one vocabulary. Those of all tokens of a text, joined, are its UTF-8."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        kinds = _kinds(json.loads(backend.decoder.__getstate__())) if backend.decoder else ()
        self._byte_level = "ByteLevel" in kinds
        self._byte_tokens = "ByteFallback" in kinds
        pieces = ((byte, char, f"<0x{byte:02X}>") for char, byte in BYTE_OF.items())
        self._single = {
            byte: backend.token_to_id(char if self._byte_level else name) for byte, char, name in pieces
        }
        """The token of each byte; None for a byte that is no token."""
        self._anchor = backend.token_to_id("a")
        """A token of which it is known that it is in the middle of a text: some decoders drop the space with
        which a text begins."""

    def of(self, token_id: int) -> bytes:
        """The bytes of one token; none of an id that the vocabulary does not have."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            found = [BYTE_OF.get(char) for char in piece]
            return piece.encode() if None in found else bytes(byte for byte in found if byte is not None)
        if self._byte_tokens and (byte := BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if self._anchor is not None:
            before, both = self._decode([self._anchor]), self._decode([self._anchor, token_id])
            if both.startswith(before):
                return both[len(before) :].encode()
        return self._decode([token_id]).encode()

    def named(self, token_id: int) -> tuple[str, bytes]:
        """The text of one token, and its bytes. If these are no whole characters, the text names them."""
        data = self.of(token_id)
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return named_bytes(data), data

    def ids_of(self, text: str) -> list[int] | None:
        """One token for each byte of the text; None if there are no such tokens."""
        ids = [self._single[byte] for byte in text.encode()]
        return None if None in ids else [token_id for token_id in ids if token_id is not None]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))


def named_bytes(data: bytes) -> str:
    """The name of bytes that are no whole characters, as OpenAI writes it: `bytes:\\xe2\\x80`."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _kinds(decoder: dict[str, Any]) -> set[str]:
    """The types of a decoder and of its parts."""
    return {decoder["type"]}.union(*(_kinds(part) for part in decoder.get("decoders", ())))


class GrowingText:
    """A text whose tokens come one by one."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """The characters that the token completes."""
        return self._decoder.decode(self._bytes_of(token_id))


def text_and_ends(ids: Sequence[int], bytes_of: Callable[[int], bytes]) -> tuple[str, list[int]]:
    """The text of the ids, and for each id how many characters are complete after it."""
    growing = GrowingText(bytes_of)
    added = [growing.add(token_id) for token_id in ids]
    return "".join(added), list(accumulate(map(len, added)))


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
            budget.spent += len(ids)
            if budget.spent > budget.limit:
                budget.refuse()
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
            budget.check(len(begin) + len(end))
            budget.spent += len(begin) + len(end)
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
