"""Where in an answer the next token falls: its content, its reasoning, or what is no text, like a tool call.

Only the renderer's parser knows the grammar of its family. It is asked: the ids so far are parsed with a
probe behind them, a text that no model says, and where the probe turns up, the next token would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal
from uuid import uuid4

from gateway.language.render import ChatRenderer, ParsedAnswer, Tool, ToolCall
from rollout_queue.contract.tokens import TokenIds

PROBE = f"p{uuid4().hex}"
LATE_CALL = "<|content_invoke_tool_json|>"
"""What makes text before it a call's name (Inkling)."""
LATER_TOKENS = ("<channel|>", LATE_CALL, "<|tool_calls_section_begin|>", "<|tool_call_begin|>")
"""Like `</think>`, these may change what was read before: a call in a thought that is closed behind it, a
second thought, a call that was spelled as text."""
INNER_TOKENS = frozenset(
    (
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call_argument_begin|>", '<|"|>'),
        *("<tool_sep:opensource>", "<arg_key:opensource>", "</arg_key:opensource>"),
        *("<arg_value:opensource>", "</arg_value:opensource>", "<｜tool▁sep｜>"),  # noqa: RUF001
    )
)
"""Inside a call these open and close nothing, and need no parse."""
TEXT_MARKS = {
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
"""What some families spell in ordinary tokens, and the token that tells such a family."""
TEXT_SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
"""Text that becomes a tool call once, much later, its section is closed (Kimi)."""
BARE_CALL = '{"name": "f", "parameters": {}}'
"""Families without marks (Llama 3) read an answer that is nothing but such an object as a call."""

Region = Literal["content", "reasoning"]


@dataclass(frozen=True)
class Markup:
    """What of a family's vocabulary structures an answer."""

    control_ids: frozenset[int]
    """Where such a token comes, another region may begin."""
    inner_ids: frozenset[int]
    frames: dict[int, str]
    """Tokens that frame a whole turn. Within an answer they are misplaced, and how they read may change."""
    byte_ids: frozenset[int]
    marks: tuple[str, ...]
    """Text that may open or close a region."""
    ends: tuple[str, ...]
    """Text from which on nothing is certain."""
    bare_calls: bool
    late_calls: bool
    probe_ids: list[int]
    probe: str
    later_ids: list[int]
    """Tokens that could still make the text before them something else."""


@lru_cache(maxsize=8)
def markup_of(renderer: ChatRenderer) -> Markup:
    """Found once for a renderer: by its vocabulary, and by asking its parser."""
    backend, encode = renderer.tokenizer.backend, renderer.tokenizer.encode
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    control = {i: text for i, text in added.items() if any(mark in text for mark in "<>[]|｜")}  # noqa: RUF001
    atomic = set(control.values())
    # The first token of a text may swallow a space; the others stand as they are.
    first, *probe_ids = encode(PROBE)
    bytes_ = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return Markup(
        control_ids=frozenset(control) | frozenset(renderer.stop_ids),
        inner_ids=frozenset(i for i, text in control.items() if text in INNER_TOKENS),
        frames={i: text for i, text in control.items() if _frames(text)},
        byte_ids=frozenset(i for i in bytes_ if i is not None),
        marks=tuple(m for m, of in TEXT_MARKS.items() if (of in atomic if of else m not in atomic)),
        ends=TEXT_SECTIONS if TEXT_SECTIONS[0] in atomic else (),
        bare_calls=bool(renderer.parse(encode(BARE_CALL), None, "").tool_calls),
        late_calls=LATE_CALL in atomic,
        probe_ids=probe_ids,
        probe=PROBE.removeprefix(renderer.text_of([first])),
        later_ids=encode("</think>" + "".join(token for token in LATER_TOKENS if token in atomic)),
    )


def _frames(text: str) -> bool:
    return "assistant" in text or any(mark in text for mark in "[]|｜〈")  # noqa: RUF001


@dataclass(frozen=True)
class PartialParse:
    """What the ids so far say, and what the next one would add to."""

    region: Region | None
    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    """Those that no later token can take back."""


class PartialParser:
    """Asks a renderer's parser about one answer."""

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

    def read(self, ids: Sequence[int]) -> PartialParse:
        """Parse the answer so far."""
        probe, probed = self._markup.probe, [*ids, *self._markup.probe_ids]
        answer = self._parse(probed)
        content, reasoning = answer.content, answer.reasoning or ""
        region: Region | None = None
        if content.endswith(probe):
            region, content = "content", content[: -len(probe)]
        elif reasoning.endswith(probe):
            region, reasoning = "reasoning", reasoning[: -len(probe)]
        called = len(answer.tool_calls) > len(self._calls)
        if called or region == "reasoning" or (region == "content" and self._markup.late_calls):
            later = self._parse([*probed, *self._markup.later_ids])
            if region is not None and probe not in (getattr(later, region) or ""):
                region = None
                content = _shared(content, later.content)
                reasoning = _shared(reasoning, later.reasoning or "")
            if later.tool_calls == answer.tool_calls:
                self._calls = answer.tool_calls
        return PartialParse(region, content, reasoning, self._calls)

    def _parse(self, ids: list[int]) -> ParsedAnswer:
        return self._renderer.parse(
            ids, self._tools, self._turn_id, partial=True, prompt_ids=self._prompt_ids
        )


def _shared(one: str, other: str) -> str:
    """How both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]
