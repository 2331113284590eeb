"""Finds the region of an unfinished answer to which the next token belongs: content, reasoning, or neither.

Only the renderer's parser knows the grammar of its chat template. So a probe, a random text that no model
writes, is appended to the ids so far, and they are parsed. The next token belongs to the region where the
parser finds the probe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal
from uuid import uuid4

from gateway.language.chat_messages import Tool
from gateway.language.parsed_answer import ParsedAnswer, ToolCall
from gateway.language.render import ChatRenderer
from rollout_queue.contract.tokens import TokenIds

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
