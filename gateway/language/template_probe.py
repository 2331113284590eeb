"""Finds out what a model's own chat template accepts and writes, by rendering example conversations.

An example with every kind of message: rendering it shows which control tokens a template uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from renderers import DefaultRendererConfig
from renderers.parsers import TOOL_PARSERS

from gateway.language.chat_messages import Message, Tool
from gateway.language.families import OWN_TEMPLATE, Family, Thinking, ToolPrompt
from gateway.language.own_renderer import OPEN, TOOL_PROMPT_EXISTS, Adaptation, TemplateRenderer
from gateway.language.own_template import FAULTS, TemplateRefusal, TemplateTokenizer
from gateway.language.thinking import SWITCHES

EXAMPLE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
EXAMPLE_MESSAGES: list[Message] = [
    {"role": "system", "content": "help"},
    {"role": "user", "content": "look"},
    {
        "role": "assistant",
        "content": "well",
        "reasoning_content": "so",
        "tool_calls": [
            {"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
            for n in range(2)
        ],
    },
    {"role": "tool", "tool_call_id": "c0", "content": "seen"},
    {"role": "tool", "tool_call_id": "c1", "content": "seen"},
]


SYSTEM: Message = {"role": "system", "content": "systemtext"}
USER: Message = {"role": "user", "content": "usertext"}
NEXT: Message = {"role": "user", "content": "nexttext"}
SAID: Message = {"role": "assistant", "content": "saidtext"}
THOUGHT: Message = {**SAID, "reasoning_content": "thoughttext"}
TOOL_NAME: str = EXAMPLE_TOOL["function"]["name"]
PLAIN, WITH_TOOLS = "chat", "tools"
NINE, LONGER = "callnine9", "call_longer_than_nine"
"""Some templates refuse a call's id that does not have nine characters."""


@dataclass(frozen=True)
class Stability:
    """Which conversations the template only extends when they grow."""

    kinds: frozenset[str]
    keeps_thoughts: bool
    """The template writes the thought of an answer, and keeps it when a tool's result follows."""
    keeps_past_thoughts: bool
    """It also keeps the thought when a user's message follows."""

    def __str__(self) -> str:
        if not self.kinds:
            return "each call renders its whole conversation, because earlier messages may change"
        kinds = " and ".join(sorted(self.kinds))
        return f"conversations ({kinds}) are bridged" + (
            "" if self.keeps_past_thoughts else ", unless a thought is dropped"
        )

    def bridges(self, tools: bool) -> bool:
        """Whether a conversation, with tools or without, only grows."""
        return (WITH_TOOLS if tools else PLAIN) in self.kinds

    def may_drop(self, new: Sequence[Message]) -> bool:
        """Whether the template may drop earlier thoughts, if there are any, once `new` follow."""
        if self.keeps_past_thoughts or not self.keeps_thoughts:
            return not self.keeps_past_thoughts
        return any(message.get("role") not in ("tool", "function") for message in new)


class Probe:
    """Renders examples with one template."""

    def __init__(self, renderer: TemplateRenderer) -> None:
        self.renderer = renderer

    def refuse_unfit(self) -> None:
        """Raise SystemExit if the template does not write a user's message, or breaks its bounds."""
        try:
            written = self.renderer.text([USER], None, ask=True)
        except TemplateRefusal as error:
            raise SystemExit(f"the model's chat template does not work: {error}") from error
        if "usertext" not in written:
            raise SystemExit("the model's chat template does not write a user's message")

    def writes_user(self) -> bool:
        return self._writes([USER], "usertext")

    def writes_calls(self) -> bool:
        return self._writes([USER, self._call(NINE), _result(NINE)], "arg", "seentext", tools=[EXAMPLE_TOOL])

    def family(self) -> Family:
        """What the template accepts."""
        system = self._system()
        nine = self._call(NINE)
        tools = self.writes_calls() and self._writes([USER], TOOL_NAME, tools=[EXAMPLE_TOOL])
        nine_only = tools and not self._renders([USER, self._call(LONGER), _result(LONGER)])
        both = {**self._call(NINE, "callnine8"), "content": "saidtext"}
        split = [{**both, "tool_calls": [call], "content": ""} for call in both["tool_calls"]]
        parallel = self._writes([USER, both], "saidtext", "argone", "argtwo")
        named = {**_result(NINE), "name": "nametext"}
        return Family(
            OWN_TEMPLATE,
            system=system,
            late_system=system and self._writes([USER, SAID, SYSTEM, USER], "systemtext"),
            opening_user="never" if self._renders([SAID, USER]) else "always",
            parallel_calls=parallel or not self._writes([USER, SAID, *split], "saidtext", "argone", "argtwo"),
            call_ids=self._writes([USER, nine, _result(NINE)], NINE),
            nine_character_ids=nine_only,
            loose_results=self._writes([USER, _result(NINE)], "seentext"),
            named_results=not self._renders([USER, nine, _result(NINE)])
            or self._writes([USER, nine, named], "nametext"),
            tools=tools,
            calls=self._reads() if tools else None,
            text_calls=bool(self.renderer.call_tags),
            switch=next(filter(self._switches, SWITCHES), None),
            thinks=any("think" in text for text in self.renderer.tokenizer.template.sources.values()),
        )

    def adaptation(self, tool_prompt: bool) -> Adaptation:
        """What has to be changed in conversations so that the template renders them."""
        both, called = {**USER, "content": "usertext\n\nnexttext"}, [USER, self._call(NINE), _result(NINE)]
        joins = set()
        if not self._renders([USER, NEXT]) and self._renders([both]):
            joins.add("user")
        if not self._renders([USER, SAID, SAID, NEXT]) and self._renders([USER, SAID, NEXT]):
            joins.add("assistant")
        between = [*called, {"role": "assistant", "content": ""}, NEXT]
        return replace(
            self.renderer.adaptation,
            tool_prompt=tool_prompt,
            system_in_user=not self._system(),
            joined_roles=frozenset(joins),
            answers_results=not self._renders([*called, NEXT]) and self._renders(between),
        )

    def _system(self) -> bool:
        return self._writes([SYSTEM, USER], "systemtext", "usertext")

    def _reads(self) -> str | None:
        """The family whose parser reads the calls."""
        if self.renderer.call_tags:
            return "qwen3"
        reader = self.renderer.reader
        name: str | None = self.renderer.config.tool_parser if reader is None else reader.config.name
        return name

    def stability(self, family: Family) -> Stability:
        """Which conversations may be bridged."""
        kinds = set()
        begin = [SYSTEM, USER] if family.system else [USER]
        if self._grows([*begin, SAID], [NEXT], None):
            kinds.add(PLAIN)
        tools = [EXAMPLE_TOOL]
        called = [*begin, self._call(NINE)]
        result = _result(NINE) | ({"name": "look"} if family.named_results else {})
        if (
            family.tools
            and self._grows([*begin, SAID], [NEXT], tools)
            and self._grows(called, [result], tools)
        ):
            kinds.add(WITH_TOOLS)
        thinking = [USER, {**called[-1], "reasoning_content": "thoughttext"}, result]
        keeps = self._writes(thinking, "thoughttext", tools=tools)
        keeps_past = not family.thinks or self._writes([USER, THOUGHT, NEXT], "thoughttext")
        return Stability(frozenset(kinds), keeps, keeps_past)

    def reads_calls(self) -> bool:
        """Whether the renderer's parser reads a call, as the template writes it, as that call."""
        called = self._call(NINE)
        try:
            asked = self.renderer.text([USER], [EXAMPLE_TOOL], ask=True)
            said = self.renderer.text([USER, called], [EXAMPLE_TOOL])
            ids = self.renderer.tokenizer.encode(said.removeprefix(asked))
            calls = self.renderer.parse_response(ids).tool_calls
        except (TemplateRefusal, *FAULTS):
            return False
        return said.startswith(asked) and [(call.name, call.arguments) for call in calls] == [
            ("look", {"at": "argone"})
        ]

    def ends(self) -> frozenset[int]:
        """The special tokens with which the template ends an answer."""
        try:
            after = self.renderer.text([USER, SAID, USER], None).partition("saidtext")[2]
        except TemplateRefusal:
            return frozenset()
        tokenizer = self.renderer.tokenizer
        return frozenset(tokenizer.encode(after.lstrip())[:1]) & tokenizer.special_ids

    def written(self) -> set[int]:
        """All ids that the template writes in the examples that it accepts."""
        ids: set[int] = set()
        for messages, tools in (
            ([SYSTEM, USER, THOUGHT, USER], None),
            ([USER, SAID, USER], None),
            ([USER, self._call(NINE), _result(NINE)], [EXAMPLE_TOOL]),
        ):
            try:
                ids.update(self.renderer.render_ids(messages, tools=tools, add_generation_prompt=True))
            except TemplateRefusal:
                continue
        return ids

    def _call(self, *call_ids: str) -> Message:
        arguments = ('{"at": "argone"}', '{"at": "argtwo"}')
        calls = [
            {"id": call_id, "type": "function", "function": {"name": "look", "arguments": written}}
            for call_id, written in zip(call_ids, arguments, strict=False)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def _grows(self, before: Sequence[Message], new: Sequence[Message], tools: list[Tool] | None) -> bool:
        try:
            return self.renderer.added(before, None, new, tools) is not None
        except TemplateRefusal:
            return False

    def _renders(self, messages: Sequence[Message]) -> bool:
        return self._writes(messages)

    def _writes(self, messages: Sequence[Message], *texts: str, tools: list[Tool] | None = None) -> bool:
        try:
            written = self.renderer.text(messages, tools, ask=True)
        except TemplateRefusal as error:
            _stop_if_unsafe(error)
            return False
        return all(text in written for text in texts)

    def _switches(self, option: str) -> bool:
        """Whether the option turns thinking on and off."""
        template = self.renderer.tokenizer.template
        switched: list[dict[str, Any]] = [{option: value} for value in (True, False)]
        try:
            on, off = (template.text([USER], add_generation_prompt=True, **each) for each in switched)
        except TemplateRefusal:
            return False
        return on != off


def _stop_if_unsafe(error: TemplateRefusal) -> None:
    if error.unsafe:
        raise SystemExit(f"the model's chat template does not work: {error}") from error


def template_renderer(
    tokenizer: TemplateTokenizer,
    eos_ids: frozenset[int],
    tool_prompt: ToolPrompt = "none",
    family_reader: Any = None,
) -> tuple[TemplateRenderer, Family, Stability]:
    """The renderer over the model's own template, with the parser that reads the calls which it writes.

    `family_reader` is the library's renderer of the family of the model's type: it may read the answers.
    Raises SystemExit for a template that does not write a user's message.
    """
    plain, stop_ids = DefaultRendererConfig(), eos_ids
    shape = _shape(tokenizer, plain, eos_ids)
    stop_ids |= Probe(TemplateRenderer(tokenizer, plain, stop_ids, shape)).ends()
    bare = Probe(TemplateRenderer(tokenizer, plain, stop_ids, shape))
    prompted = tool_prompt == "hermes" and not bare.family().tools
    adaptation = bare.adaptation(prompted)
    configurations = [DefaultRendererConfig(tool_parser=parser) for parser in TOOL_PARSERS]
    made = [TemplateRenderer(tokenizer, each, stop_ids, adaptation) for each in configurations]
    if prompted and tokenizer.backend.token_to_id(OPEN) is None:
        made = []  # those parsers know tags as tokens only
    elif family_reader is not None:
        made.append(TemplateRenderer(tokenizer, plain, stop_ids, adaptation, family_reader))
    able = (each for each in made if Probe(each).reads_calls())
    probe = Probe(next(able, TemplateRenderer(tokenizer, plain, stop_ids, adaptation)))
    family = probe.family()
    return probe.renderer, family, probe.stability(family)


def _shape(
    tokenizer: TemplateTokenizer, plain: DefaultRendererConfig, stop_ids: frozenset[int]
) -> Adaptation:
    """In which form the template reads contents and arguments. Raises SystemExit if it reads none."""

    def probe(shape: Adaptation) -> Probe:
        return Probe(TemplateRenderer(tokenizer, plain, stop_ids, shape))

    parts = not probe(Adaptation()).writes_user() and probe(Adaptation(parts=True)).writes_user()
    shape = Adaptation(parts=parts)
    probe(shape).refuse_unfit()
    texts = replace(shape, text_arguments=True)
    return texts if not probe(shape).writes_calls() and probe(texts).writes_calls() else shape


def kept_by(configuration: DefaultRendererConfig, thinking: Thinking) -> DefaultRendererConfig:
    """The configuration with which prompts keep the earlier thoughts that `thinking` says."""
    retention = "all" if thinking == "all" else None
    return configuration.model_copy(update={"thinking_retention": retention})


def read_calls(family: Family) -> str:
    """How the calls of a model with its own template are read, for operators."""
    if not family.tools:
        return f"it writes no tools, so calls with tools are refused. {TOOL_PROMPT_EXISTS}"
    if family.calls is None:
        return "no parser reads its tool calls, so they stay text in the answer"
    return f"its tool calls are read like those of {family.calls}"


def _result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "seentext"}
