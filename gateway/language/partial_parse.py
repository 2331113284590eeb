"""Finds the region of an unfinished answer to which the next token belongs: content, reasoning, or neither;
and makes whole characters of token ids.

Only the renderer's parser knows the grammar of its chat template. So a probe, a random text that no model
writes, is appended to the ids so far, and they are parsed. The next token belongs to the region where the
parser finds the probe.

Text is streamed only once no later token can change it:

token ids ──IncrementalDetokenizer──▶ whole characters ──StreamedText──▶ text that is safe to send

Incomplete characters, the possible beginning of a stop string or of a tag, and trailing space are held back.

FastParser reads answers without markup, in a small part of the time that the renderer's parser takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal
from uuid import uuid4

from tokenizers import Tokenizer, decoders

from gateway.language.chat_messages import Tool
from gateway.language.parsed_answer import ParsedAnswer, ToolCall
from gateway.language.render import ChatRenderer
from rollout_queue.contract.packed_tokens import TokenIds

PROBE = f"p{uuid4().hex}"
LATE_CALL = "<|content_invoke_tool_json|>"
"""This token turns the text before it into the name of a call (Inkling)."""
LATER_TOKENS = ("<channel|>", LATE_CALL, "<|tool_calls_section_begin|>", "<|tool_call_begin|>")
"""Tokens that, like `</think>`, may change how earlier text is parsed. A call may turn out to be a part of
the reasoning, content to be a second block of reasoning, and text to be a call."""
INNER_TOKENS = frozenset(
    (
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call_argument_begin|>", '<|"|>'),
        *("<tool_sep:opensource>", "<arg_key:opensource>", "</arg_key:opensource>"),
        *("<arg_value:opensource>", "</arg_value:opensource>", "<｜tool▁sep｜>"),  # noqa: RUF001
    )
)
"""Tokens inside a call that neither begin nor end a region, so no parse is needed at them."""
TEXT_TAGS = {
    "<think>": "",
    "</think>": "",
    "thought\n": "<|channel>",
    **dict.fromkeys(
        (
            *("<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>", "<｜DSML｜tool>", "</｜DSML｜tool_calls>"),  # noqa: RUF001
            *("<｜DSML｜invoke", "</｜DSML｜invoke>"),  # noqa: RUF001
        ),
        "｜DSML｜",  # noqa: RUF001
    ),
}
"""Tags that some families write in ordinary tokens. The value is a control token that only those families
have; with "", the tag counts in all families in which it is not a control token itself."""
TEXT_SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
"""Text after one of these becomes a tool call once the section is closed, maybe much later (Kimi)."""
BARE_CALL = '{"name": "f", "parameters": {}}'
"""Families without tags for calls (Llama 3) parse an answer that is nothing but such an object as a call."""

Region = Literal["content", "reasoning"]


@dataclass(frozen=True)
class Markup:
    """The tokens and texts by which a chat template structures an answer."""

    control_ids: frozenset[int]
    """At such a token another region may begin."""
    inner_ids: frozenset[int]
    """The ids of INNER_TOKENS."""
    frames: dict[int, str]
    """Tokens that frame a whole message, by id. They do not belong in an answer. If one appears in it, later
    tokens may change how it is parsed."""
    byte_ids: frozenset[int]
    """Tokens `<0x00>` to `<0xFF>`, each for one byte."""
    tags: tuple[str, ...]
    """Texts that may begin or end a region."""
    ends: tuple[str, ...]
    """After one of these texts, any later token may change how the text is parsed."""
    bare_calls: bool
    """An answer that is one JSON object is parsed as a call."""
    late_calls: bool
    """The family has the token LATE_CALL."""
    probe_ids: list[int]
    """The ids of PROBE without the first one."""
    probe: str
    """The text of `probe_ids`."""
    later_ids: list[int]
    """Tokens that may change how the text before them is parsed."""


@lru_cache(maxsize=32)
def markup_of(renderer: ChatRenderer) -> Markup:
    """The markup of a renderer's template, from its vocabulary and from a trial of its parser; cached."""
    backend, encode = renderer.tokenizer.backend, renderer.tokenizer.encode
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    control = {i: text for i, text in added.items() if any(character in text for character in "<>[]|｜")}  # noqa: RUF001
    single_tokens = set(control.values())
    # The first token of a text may decode without its leading space, so the probe begins with the second.
    first, *probe_ids = encode(PROBE)
    bytes_ = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return Markup(
        control_ids=frozenset(control) | frozenset(renderer.stop_ids),
        inner_ids=frozenset(i for i, text in control.items() if text in INNER_TOKENS),
        frames={i: text for i, text in control.items() if _frames(text)},
        byte_ids=frozenset(i for i in bytes_ if i is not None),
        tags=(
            *(t for t, of in TEXT_TAGS.items() if (of in single_tokens if of else t not in single_tokens)),
            *getattr(renderer.template, "call_tags", ()),
        ),
        ends=TEXT_SECTIONS if TEXT_SECTIONS[0] in single_tokens else (),
        bare_calls=bool(renderer.parse(encode(BARE_CALL), None, "").tool_calls),
        late_calls=LATE_CALL in single_tokens,
        probe_ids=probe_ids,
        probe=PROBE.removeprefix(renderer.text_of([first])),
        later_ids=encode("</think>" + "".join(token for token in LATER_TOKENS if token in single_tokens)),
    )


def _frames(text: str) -> bool:
    return "assistant" in text or any(character in text for character in "[]|｜〈")  # noqa: RUF001


@dataclass(frozen=True)
class PartialParse:
    """The parse of the ids so far."""

    region: Region | None
    """The region of the next token; None inside a tool call, or if the region is not known yet."""
    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    """Calls that no later token can change."""


class PartialParser:
    """Parses one answer as it grows."""

    def __init__(
        self,
        renderer: ChatRenderer,
        tools: list[Tool] | None,
        turn_id: str,
        prompt_ids: TokenIds | None,
    ) -> None:
        self._renderer = renderer
        self._tools = tools
        self._turn_id = turn_id
        self._prompt_ids = prompt_ids
        self._markup = markup_of(renderer)
        self._calls: tuple[ToolCall, ...] = ()

    def parse(self, ids: Sequence[int]) -> PartialParse:
        """Parse the answer so far."""
        probe, probed = self._markup.probe, [*ids, *self._markup.probe_ids]
        answer = self._answer(probed)
        content, reasoning = answer.content, answer.reasoning or ""
        region: Region | None = None
        if content.endswith(probe):
            region, content = "content", content[: -len(probe)]
        elif reasoning.endswith(probe):
            region, reasoning = "reasoning", reasoning[: -len(probe)]
        if ids or region == "reasoning" or self._markup.late_calls:
            # Keep only what stays the same if tokens follow that change how earlier text is parsed.
            later = self._answer([*probed, *self._markup.later_ids])
            if region is None or probe not in (getattr(later, region) or ""):
                region = None
                content = _common_prefix(content, later.content)
                reasoning = _common_prefix(reasoning, later.reasoning or "")
            if later.tool_calls == answer.tool_calls:
                self._calls = answer.tool_calls
        return PartialParse(region, content, reasoning, self._calls)

    def _answer(self, ids: list[int]) -> ParsedAnswer:
        return self._renderer.parse(
            ids, self._tools, self._turn_id, partial=True, prompt_ids=self._prompt_ids
        )


def _common_prefix(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, and so the most tokens that one character can span."""


class IncrementalDetokenizer:
    """Decodes ids step by step; the texts of all steps add up to the decoding of all ids at once."""

    def __init__(self, backend: Tokenizer, byte_ids: frozenset[int]) -> None:
        self._backend = backend
        self._byte_ids = byte_ids
        # A byte-level token decodes to the same bytes everywhere; others may differ at the start of a text.
        self._needs_context = not isinstance(backend.decoder, decoders.ByteLevel)
        self._context: list[int] = []
        self._context_length = 0
        self.held: list[int] = []
        """Ids whose text may still change."""

    def step(self, ids: list[int]) -> str:
        """The text that these ids complete."""
        self.held = held = self.held + ids
        if not held or held[-1] in self._byte_ids:
            return ""  # whether a run of byte tokens is valid UTF-8 is known at its end
        text = self._decode(held)
        if not text.endswith(REPLACEMENT):
            return self._release(text, len(held))
        for count in range(1, min(LONGEST_CHARACTER, len(held) - 1) + 1):
            head, tail = self._decode(held[:-count]), self._backend.decode(held[-count:], False)
            if head + tail == text:  # no character spans the cut
                return self._release(head, len(held) - count)
        return ""

    def _decode(self, ids: list[int]) -> str:
        if not self._context:
            return self._backend.decode(ids, False)
        return self._backend.decode(self._context + ids, False)[self._context_length :]

    def _release(self, text: str, count: int) -> str:
        if self._needs_context:
            self._context = self.held[count - 1 : count]
            self._context_length = len(self._backend.decode(self._context, False))
        self.held = self.held[count:]
        return text


class StreamedText:
    """One text of an answer, content or reasoning: what was sent to the client, and what is held back."""

    def __init__(
        self,
        ends: tuple[str, ...],
        tags: tuple[str, ...] = (),
        deferred_prefix: str = "",
        *,
        keep_leading_space: bool = False,
    ) -> None:
        self._ends = ends
        """If one of these appears, the text from there on is sent only at the end of the answer."""
        self._tags = tags
        """Strings that the parser may remove from the text, such as `<think>`."""
        self._deferred_prefix = deferred_prefix
        """A text that begins with this is sent only at the end of the answer."""
        self._keep_leading_space = keep_leading_space
        self._sent: list[str] = []
        self._held = ""
        self._ended = False
        self._broken_character = False
        """The text broke off in what may be a character. The rest of the character may follow after a tool
        call, so only the whole answer tells which character it is."""

    @property
    def sent(self) -> str:
        return "".join(self._sent)

    def add(self, text: str) -> bool:
        """Append text, held back until `release`. Returns whether it completes a tag."""
        if self._ended or self._broken_character:
            self._ended = True
            return False
        before = len(self._held)
        self._held += text
        return bool(self._tags) and any(
            self._held.find(tag, max(0, before - len(tag) + 1)) >= 0 for tag in self._tags
        )

    def end_at(self, end: str) -> None:
        """From now on, hold back the text from `end` on."""
        if end not in self._ends:
            self._ends = (*self._ends, end)

    def restart(self, whole: str) -> bool:
        """Set the text so far to `whole`. If it contradicts the sent text, do nothing and return False."""
        whole, sent = self._begin(whole), self.sent
        if not whole.startswith(sent):
            return False
        self._held, self._ended = whole[len(sent) :], False
        self._broken_character = self._held.rstrip().endswith(REPLACEMENT)
        return True

    def release(self) -> str:
        """The part of the held text that can be sent now; it counts as sent."""
        text = self._held if self._sent else self._begin(self._held)
        safe = _without_open_end(text[: self._safe_length(text)])
        self._held = text[len(safe) :]
        if safe:
            self._sent.append(safe)
        return safe

    def rest(self, whole: str) -> str:
        """The part of the final text that was not sent yet; empty if `whole` contradicts the sent text."""
        return self._held if self.restart(whole) else ""

    def _begin(self, text: str) -> str:
        return text if self._keep_leading_space else text.lstrip()

    def _safe_length(self, text: str) -> int:
        if self._deferred_prefix and not self._sent and text.startswith(self._deferred_prefix):
            self._ended = True
            return 0
        for end in self._ends:
            at = text.find(end)
            if at >= 0:
                self._ended, text = True, text[:at]
        length = len(text)
        for tag in self._ends + self._tags:
            length = min(length, start_of_partial(text, tag))
        return length


def start_of_partial(text: str, tag: str) -> int:
    """The position from which on `text` is a beginning of `tag`; the length of `text` if there is none."""
    at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while at >= 0 and not tag.startswith(text[at:]):
        at = text.find(tag[0], at + 1)
    return len(text) if at < 0 else at


def _without_open_end(text: str) -> str:
    """The text without trailing space and replacement characters, which may be parts of one character."""
    text = text.rstrip()
    while text.endswith(REPLACEMENT):
        text = text.rstrip(REPLACEMENT).rstrip()
    return text


MAX_KNOWN_ENDS = 256
LONGEST_END = 16
"""The most tokens from a prompt's last control token to its end, such as `<|im_start|>assistant\\n`."""


class FastParser:
    """Reads an answer that is plain content: no reasoning, no tool call."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._markup = markup_of(renderer)
        self._stop_ids = frozenset(renderer.stop_ids)
        self._content_first: dict[tuple[int, ...], bool] = {}
        """For each end of a prompt: whether the answer begins with content, and not inside reasoning. A
        template has few ends. If there are more than MAX_KNOWN_ENDS, they contain text of users: the first
        ones are kept, and prompts with another end are parsed each time."""

    def read(self, ids: Sequence[int], prompt_ids: TokenIds) -> ParsedAnswer | None:
        """The answer; None if the renderer's parser has to read it."""
        text_ids = ids[:-1] if ids and ids[-1] in self._stop_ids else ids
        if not self._markup.control_ids.isdisjoint(text_ids) or not self._begins_with_content(prompt_ids):
            return None
        text = self._renderer.tokenizer.decode(text_ids).strip()
        if self._markup.bare_calls and text.startswith("{"):
            return None
        if any(tag in text for tag in self._markup.tags + self._markup.ends):
            return None
        return ParsedAnswer(text)

    def _begins_with_content(self, prompt_ids: TokenIds) -> bool:
        tail = prompt_ids[-LONGEST_END:].tolist()
        control = self._markup.control_ids
        start = next((at for at in range(len(tail) - 1, -1, -1) if tail[at] in control), None)
        if start is None:
            return False
        end = tuple(tail[start:])
        known = self._content_first.get(end)
        if known is None:
            parse = PartialParser(self._renderer, None, "", prompt_ids).parse(())
            known = parse.region == "content" and not parse.reasoning
            if len(self._content_first) < MAX_KNOWN_ENDS:
                self._content_first[end] = known
        return known


@lru_cache(maxsize=32)
def fast_parser(renderer: ChatRenderer) -> FastParser:
    """The parser of plain answers of this template."""
    return FastParser(renderer)
