"""Reads the messages of a prompt back from its token ids, for people who look at a conversation.

<|im_start|>user ⏎ hi <|im_end|> ──▶ user: hi      [INST] hi [/INST] ──▶ user: hi

Messages are told apart by control tokens, and never by text: no user or tool can write a control token, so
none can write a message of another role. What a template marks in ordinary text is read as one message.

The text of each token of a sequence, for people who look at single tokens.

Several tokens may make one character together. Then the first of them has the character, and the others have
None: they have no text of their own.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from tokenizers import decoders

from gateway.language.partial_parse import LONGEST_CHARACTER, IncrementalDetokenizer, markup_of
from gateway.language.render import ChatRenderer
from gateway.language.tokenizer import BareTokenizer
from rollout_queue.contract.packed_tokens import TokenIds

PromptRole = Literal["system", "user", "assistant", "tool", "prompt"]
"""`prompt`: the template does not say whose text it is."""
ROLES: dict[str, PromptRole] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "inst", "human"), "user"),
    **dict.fromkeys(("assistant", "chatbot", "model", "ai"), "assistant"),
    **dict.fromkeys(("tool", "ipython", "function", "observation", "environment"), "tool"),
}
RESULTS = frozenset({"response", "responses", "output", "outputs", "result", "results", "message"})
"""`<tool_response>` begins a tool's message, `<tool_call>` does not."""
OPENINGS = frozenset(
    {"imstart", "startheaderid", "headerstart", "startofturn", "turn", "start", "b", "startofrole"}
)
"""Control tokens after which a word names the role, without their signs."""
HEADER_ENDS = frozenset({"immiddle", "endheaderid", "headerend", "endofrole"})
PARTS = frozenset(
    {"message", "contenttext", "contentthinking", "contentxml", "contentinvoketooljson", "channel"}
)
"""They begin a part of a message. A sampled answer has them, so its parser needs them."""
ENDS = frozenset({"end", "eot", "eos", "eom"})
FRAME = re.compile(r"beginof|bos$|^sop$|gmask|pad$|vision|image|video|audio")
"""Control tokens that are no text: those around the whole prompt, and those of images."""
WORD = re.compile(r"\s*([A-Za-z_]{1,20})(?:[ \t]*\n|[ \t]*$|[ \t:]+)")
NAMED = re.compile(r"[a-z]+")
SIGNS = re.compile(r"[^a-z/]+")


class PromptMessage(NamedTuple):
    """One message, and which ids of the prompt are its content."""

    role: PromptRole
    text: str
    start: int
    end: int


class _Piece(NamedTuple):
    """A control token, or the text between two of them."""

    name: str | None
    """Of a control token, in small letters."""
    text: str
    start: int
    ids: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class PromptReader:
    """Reads the prompts of one model."""

    def __init__(self, tokenizer: BareTokenizer) -> None:
        self._tokenizer = tokenizer

    def read(self, ids: Sequence[int]) -> list[PromptMessage]:
        """The messages of a prompt or of a part of it, the oldest first. An empty message is left out."""
        found = _Messages(self._tokenizer)
        for piece in self._pieces(ids):
            found.add(piece)
        return found.end(len(ids))

    def _pieces(self, ids: Sequence[int]) -> Iterator[_Piece]:
        added, start = self._tokenizer.added_ids, 0
        for control, each in groupby(ids, added.__contains__):
            run = list(each)
            if not control:
                yield _Piece(None, self._tokenizer.decode(run), start, run)
            for at, token_id in enumerate(run if control else (), start):
                text = self._tokenizer.token_text(token_id)[0]
                yield _Piece(text.lower(), text, at, [token_id])
            start += len(run)


class _Messages:
    """The messages found so far, and the one that is being read."""

    def __init__(self, tokenizer: BareTokenizer) -> None:
        self._tokenizer = tokenizer
        self._found: list[PromptMessage] = []
        self._begin(None, 0)

    def _begin(self, role: PromptRole | None, start: int, *, header: bool = False) -> None:
        """`header`: the role's name comes next."""
        self._role, self._start, self._header = role, start, header
        self._texts: list[str] = []
        self._says = False
        """Whether there is any text beside control tokens."""

    def add(self, piece: _Piece) -> None:
        if piece.name is None:
            self._add_text(piece)
            return
        name, kind = piece.name, _kind(piece.name)
        if kind == "opens":
            self._close(piece.start)
            role = _role_of(name)
            self._begin(role, piece.end, header=role is None)
        elif kind in ("header_end", "part"):
            self._end_header(piece.end if kind == "header_end" else self._start)
        elif kind == "closes":
            self._close(piece.start)
            # After the results of tools, some templates let the assistant go on without a mark.
            result = _of_tools(NAMED.findall(name)) == "tool"
            self._begin("assistant" if result else None, piece.end)
        elif kind == "text":
            self._texts.append(piece.text)

    def end(self, at: int) -> list[PromptMessage]:
        self._close(at)
        roles = [each.role for each in self._found[:2]]
        # What comes before the first mark is the system's, in templates that mark users and assistants only.
        if roles == ["prompt", "user"]:
            self._found[0] = self._found[0]._replace(role="system")
        return self._found

    def _add_text(self, piece: _Piece) -> None:
        text = piece.text
        if self._header and (named := WORD.match(text)):
            self._role, self._header = ROLES.get(named[1].lower(), "prompt"), False
            self._start = piece.start + self._length_of(piece.ids, named.end())
            text = text[named.end() :]
        self._texts.append(text)
        self._says = self._says or bool(text.strip())

    def _length_of(self, ids: Sequence[int], characters: int) -> int:
        """How many of the ids make so many characters."""
        return next(
            (n for n in range(1, len(ids)) if len(self._tokenizer.decode(ids[:n])) >= characters), len(ids)
        )

    def _end_header(self, start: int) -> None:
        """What was read until here names the author, and is no content."""
        self._begin(ROLES.get("".join(self._texts).strip().lower()) or self._role, start)

    def _close(self, at: int) -> None:
        if self._says:
            text = "".join(self._texts).strip()
            self._found.append(PromptMessage(self._role or "prompt", text, self._start, at))


def _kind(name: str) -> Literal["opens", "header_end", "part", "closes", "frame", "text"]:
    """What a control token does."""
    plain = SIGNS.sub("", name).removesuffix("token").removesuffix("opensource")
    if _role_of(name) is not None or plain in OPENINGS or name == "]~b]":
        return "opens"
    if plain in HEADER_ENDS:
        return "header_end"
    if plain in PARTS:
        return "part"
    words = NAMED.findall(name)
    if (
        ENDS.intersection(words)
        or words == ["s"]
        or name == "[e~["
        or (_ends_part(name) and _of_tools(words))
    ):
        return "closes"
    return "frame" if FRAME.search(plain) else "text"


def _ends_part(name: str) -> bool:
    """`</part>`, `[/PART]` or `<part|>`."""
    return "/" in name or (name.endswith("|>") and not name.startswith("<|"))


def _role_of(name: str) -> PromptRole | None:
    """The role whose message a control token begins, as `<|user|>` does; None if it begins none."""
    words = NAMED.findall(name)
    if name.startswith("[/inst"):
        return "assistant"
    if _ends_part(name) or ENDS.intersection(words):
        return None
    if {"tool", "tools"}.intersection(words):
        return _of_tools(words)
    return next((ROLES[each] for each in words if each in ROLES), None)


def _of_tools(words: Sequence[str]) -> PromptRole | None:
    """Whose message begins or ends with a token of these words, one of which is `tool`."""
    if not {"tool", "tools"}.intersection(words):
        return None
    if "available" in words:
        return "system"
    return "tool" if RESULTS.intersection(words) else None


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
