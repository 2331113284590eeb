"""Chooses a model's chat template at the start: the code of its family, or the template beside its tokenizer.

setting, name, type ──▶ family ──the tokens are there, and both write the same──▶ the family's code
                               ──else──▶ the model's own template

Compares at the start what a family's code and the model's own template write for the same conversations.

A model may have its family's type and another template: it was tuned on ChatML, or distilled from a reasoner,
or its template was edited. It knows the prompts of its own template.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from renderers import config_from_name, create_renderer

from gateway.language.chat_messages import Message, MessageNormalizer, Tool
from gateway.language.families import OWN_TEMPLATE, Family, Thinking, ToolPrompt, configuration
from gateway.language.image_pads import OnePadTemplate, Vision, vision_of
from gateway.language.own_renderer import TemplateRenderer, with_objects, with_thinking
from gateway.language.own_template import (
    OwnTemplate,
    TemplateRefusal,
    TemplateTokenizer,
    no_template,
    own_template,
)
from gateway.language.template_probe import (
    EXAMPLE_MESSAGES,
    EXAMPLE_TOOL,
    Probe,
    Stability,
    kept_by,
    template_renderer,
)
from gateway.language.tokenizer import BareTokenizer
from rollout_queue import clock
from rollout_queue.protocol.message import ModelCheck, Outcome

SHOWN = 40
"""How many characters of each text are shown around the first difference."""
DATE, DATED = "date_string", "%d %b %Y"
"""The option of a family (Llama 3) for a date. The templates of some of its models take it from the clock."""

SYSTEM: Message = {"role": "system", "content": "systemtext"}
USER: Message = {"role": "user", "content": "usertext"}
NEXT: Message = {"role": "user", "content": "nexttext"}
SAID: Message = {"role": "assistant", "content": "saidtext"}
THOUGHT = {"reasoning_content": "thoughttext"}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "callnine9", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    ],
}
RESULT: Message = {"role": "tool", "tool_call_id": "callnine9", "name": "look", "content": "seentext"}
PROBES: dict[str, tuple[Sequence[Message], bool]] = {
    "a user's message": ([USER], False),
    "a system prompt": ([SYSTEM, USER], False),
    "several turns": ([SYSTEM, USER, SAID, NEXT], False),
    "tools": ([SYSTEM, USER], True),
    "tools without a system prompt": ([USER], True),
    "a call and its result": ([SYSTEM, USER, CALL, RESULT], True),
    "a turn after a result": ([USER, CALL, RESULT, SAID, NEXT], True),
    "a thought before a call": ([USER, {**CALL, **THOUGHT}, RESULT], True),
    "a thought of an earlier turn": ([USER, {**SAID, **THOUGHT}, NEXT], False),
}
"""Conversations by what they show, and whether they have tools."""


@dataclass(frozen=True)
class TemplateCheck:
    """What the check found: which template writes the prompts, and how the two differ."""

    family: str
    """The family of the setting, or of the model's name or type; `own-template` if there is none."""
    own: bool = False
    """The model has a template of its own, which writes some of the probes."""
    difference: str | None = None
    """The first difference, with both texts."""
    refused: tuple[str, ...] = ()
    """What only one of the two writes, or why nothing was compared."""
    dated: bool = False
    """The template writes today's date."""
    by_setting: bool = False
    """The setting `gateway.renderer` names the family."""

    @property
    def own_wins(self) -> bool:
        """The model's own template writes the prompts, although the library has the family."""
        return self.difference is not None and not self.by_setting

    @property
    def agrees(self) -> bool | None:
        """Whether both write the same; None if nothing was compared."""
        return self.difference is None if self.own and self.family != OWN_TEMPLATE else None

    @property
    def row(self) -> ModelCheck:
        """The row of the model's table."""
        outcome: Outcome = "differs" if self.difference is not None else "right"
        if self.agrees is None and self.family != OWN_TEMPLATE:
            outcome = "unknown"
        return ModelCheck(check="chat template", outcome=outcome, detail=self._words)

    @property
    def _words(self) -> str:
        if self.family == OWN_TEMPLATE:
            return ". ".join(("the model's own one", *self.refused))
        if self.agrees is None:
            why = ". ".join(self.refused) or "the model has none of its own"
            return f"that of the family {self.family}. Not compared: {why}"
        refused = f" (not compared: {', '.join(self.refused)})" if self.refused else ""
        if self.difference is None:
            return f"the model's own one and the family {self.family} write the same{refused}"
        if self.by_setting:
            return (
                f"gateway.renderer is {self.family}, but the model's own one differs: set auto"
                f" or {OWN_TEMPLATE} to use it. {self.difference}{refused}"
            )
        return (
            f"the model's own one is used, because it differs from the family {self.family}:"
            f" set gateway.renderer to {self.family} to use that one. {self.difference}{refused}"
        )


def checked(family: str, tokenizer: BareTokenizer, model_path: Path, by_setting: bool) -> TemplateCheck:
    """Compare the family of the library with the model's own template, if it has one that works."""
    try:
        own = own_template(model_path)
    except SystemExit as error:
        return TemplateCheck(family, refused=(str(error),), by_setting=by_setting)
    if own is None:
        return TemplateCheck(family, by_setting=by_setting)
    plain = config_from_name(family)
    configurations = [plain]
    if DATE in getattr(type(plain), "model_fields", {}):
        configurations.append(_dated(plain))
    for dated, each in enumerate(configurations):
        found = list(_compared(create_renderer(tokenizer, each), tokenizer, own))
        difference = next((text for _, text in found if text), None)
        if difference is None or not dated:
            refused = tuple(name for name, text in found if text is None)
            some = len(refused) < len(found)
            check = TemplateCheck(family, some, difference, refused, bool(dated), by_setting)
        if difference is None:
            break
    return check


def today_for(configuration: Any, check: TemplateCheck) -> Any:
    """The configuration of a family, with today's date if the model's own template writes it."""
    return _dated(configuration) if check.dated else configuration


def _dated(configuration: Any) -> Any:
    today = time.strftime(DATED, time.localtime(clock.now()))
    return configuration.model_copy(update={DATE: today})


def _compared(family: Any, tokenizer: BareTokenizer, own: OwnTemplate) -> Iterator[tuple[str, str | None]]:
    """For each probe its name, and the first difference: empty if there is none, None if one refuses it."""
    for name, (messages, with_tools) in PROBES.items():
        tools: list[Tool] | None = [EXAMPLE_TOOL] if with_tools else None
        try:
            text = own.text(
                [with_thinking(with_objects(each)) for each in messages],
                tools=tools,
                add_generation_prompt=True,
            )
            theirs = family.render_ids(
                [dict(each) for each in messages], tools=tools, add_generation_prompt=True
            )
        except (TemplateRefusal, ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
            if isinstance(error, TemplateRefusal) and error.unsafe:  # no other probe may take as long
                yield f"the model's own template does not work: {error}", None
                return
            yield name, None
            continue
        ours = tokenizer.encode(text)
        yield name, "" if ours == theirs else _difference(name, text, ours, theirs, tokenizer)


def _difference(
    name: str, own: str, own_ids: list[int], family_ids: list[int], tokenizer: BareTokenizer
) -> str:
    family = tokenizer.decode(family_ids)
    if own == family:
        pairs = enumerate(zip(own_ids, family_ids, strict=False))
        at = next((at for at, (one, other) in pairs if one != other), min(len(own_ids), len(family_ids)))
        shown: tuple[Any, Any] = own_ids[at : at + 4], family_ids[at : at + 4]
    else:
        pairs_of_text = enumerate(zip(own, family, strict=False))
        at = next((at for at, (one, other) in pairs_of_text if one != other), min(len(own), len(family)))
        start = max(0, at - SHOWN // 2)
        shown = own[start : at + SHOWN], family[start : at + SHOWN]
    return f"With {name}, it writes {shown[0]!r}, the family {shown[1]!r}"


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """What the settings say of the template."""

    renderer: str
    thinking: Thinking
    tool_prompt: ToolPrompt


@dataclass(frozen=True)
class Choice:
    """The template that writes a model's prompts."""

    family: Family
    tokenizer: BareTokenizer
    template: Any
    configuration: Any
    check: TemplateCheck
    vision: Vision | None = None
    """How the model reads images; None if it reads text only."""
    stability: Stability | None = None
    """What is known of the model's own template; None if the library has its family."""

    def remade(self, configuration: Any) -> Any:
        """The template with another configuration, and today's date."""
        if isinstance(self.template, TemplateRenderer):
            return self.template.with_config(configuration)
        made = create_renderer(self.tokenizer, today_for(configuration, self.check))
        return made if self.vision is None else OnePadTemplate(made)

    def written(self) -> Iterable[int]:
        """The ids that the template writes around the messages of examples."""
        if self.stability is not None:
            return Probe(self.template).written()
        example = MessageNormalizer(self.family, str, str).conversation(EXAMPLE_MESSAGES, [EXAMPLE_TOOL])
        ids: list[int] = self.template.render_ids(example, tools=[EXAMPLE_TOOL], add_generation_prompt=True)
        return ids


def chosen(
    model_path: Path, family: Family, wanted: Wanted, first_eos: int | None, eos_ids: frozenset[int]
) -> Choice:
    """The template of a model. Raises SystemExit if it has none, or does not fit the one of the settings."""
    known = family.name != OWN_TEMPLATE
    library = _of_library(model_path, family, wanted, first_eos) if known else None
    unfit = (f"The tokenizer lacks tokens of the family {family.name}",) if known else ()
    check = TemplateCheck(OWN_TEMPLATE, own=True, refused=unfit) if library is None else library.check
    if library is not None and not check.own_wins:
        return library
    template = own_template(model_path) or no_template(model_path)
    tokenizer = TemplateTokenizer(model_path, first_eos, template)
    reader = None if library is None else library.template
    own, accepts, stability = template_renderer(tokenizer, eos_ids, wanted.tool_prompt, reader)
    kept = kept_by(own.config, wanted.thinking)
    return Choice(accepts, tokenizer, own, kept, check, stability=stability)


def _of_library(model_path: Path, family: Family, wanted: Wanted, first_eos: int | None) -> Choice | None:
    """The template of the family; None if the model lacks its tokens, unless the settings name the family."""
    tokenizer, by_setting = BareTokenizer(model_path, first_eos), wanted.renderer != "auto"
    vision = vision_of(model_path) if family.name == "qwen3-vl" else None
    try:
        made = create_renderer(tokenizer, options := configuration(family, wanted.thinking))
        check = checked(family.name, tokenizer, model_path, by_setting)
        if check.dated:
            made = create_renderer(tokenizer, today_for(options, check))
    except AssertionError as why:  # the tokenizer lacks a control token
        if by_setting:
            raise SystemExit(f"gateway.renderer {wanted.renderer!r} does not fit the model: {why}") from why
        return None
    template = made if vision is None else OnePadTemplate(made)
    return Choice(family, tokenizer, template, options, check, vision)
