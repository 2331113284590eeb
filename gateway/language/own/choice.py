"""Chooses a model's chat template at the start: the code of its family, or the template beside its tokenizer.

setting, name, type ──▶ family ──the tokens are there, and both write the same──▶ the family's code
                               ──else──▶ the model's own template
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from renderers import create_renderer

from gateway.language.chat_messages import MessageNormalizer
from gateway.language.families import OWN_TEMPLATE, Family, Thinking, ToolPrompt, configuration
from gateway.language.images.one_pad import OnePadTemplate
from gateway.language.images.vision import Vision, vision_of
from gateway.language.own.comparison import TemplateCheck, checked, today_for
from gateway.language.own.example_conversation import EXAMPLE_MESSAGES, EXAMPLE_TOOL
from gateway.language.own.probe import Probe, Stability, kept_by, template_renderer
from gateway.language.own.renderer import TemplateRenderer
from gateway.language.own.template import TemplateTokenizer, no_template, own_template
from gateway.language.tokenizer import BareTokenizer

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
