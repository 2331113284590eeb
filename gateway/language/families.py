"""Finds the family of a model: its chat template, which other models share, and what the template accepts.

config.json, or the name in the settings ──▶ Family ──▶ configuration of the library `renderers`
                                             none ──▶ the model's own template
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from renderers import config_from_name
from renderers.base import MODEL_RENDERER_MAP

from gateway.language.tokenizer_files import named_tokens, object_in, tokenizer_settings
from rollout_queue.model_files import CONFIG, text_config

Thinking = Literal["auto", "template", "all"]
ToolPrompt = Literal["none", "hermes"]

GENERATION, ENDS = "generation_config.json", "eos_token_id"
CONTEXT_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"),
    *("model_max_length", "n_ctx"),
)
"""How kinds of models name their longest context in config.json."""
MOST_IDS = 2**31
"""No vocabulary has as many tokens. Some files name -1 where a model has no such token."""

FAMILY_OF_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
    "qwen3_vl": "qwen3-vl",
    "qwen3_vl_moe": "qwen3-vl",
    "llama": "llama-3",
    "gpt_oss": "gpt-oss",
    "gemma4": "gemma4",
    "kimi_k2": "kimi-k2",
    "kimi_k25": "kimi-k2.5",
    "minimax_m2": "minimax-m2",
    "glm_moe_dsa": "glm-5",
}
"""Model types with one template. `deepseek_v3` and `glm4_moe` have several: the settings may name one."""

KEEPS_THINKING: dict[str, dict[str, bool]] = {
    "qwen3.6": {"preserve_thinking": True},
    "qwen3.8": {"preserve_thinking": True},
    "gemma4": {"preserve_thinking": True},
    "laguna-s-2.1": {"preserve_thinking": True},
    "glm-5": {"clear_thinking": False},
    "glm-5.1": {"clear_thinking": False},
    "glm-5.3": {"clear_thinking": False},
    "hy3": {"preserved_thinking": True},
    "nemotron-3": {"truncate_history_thinking": False},
    "nemotron-3-ultra": {"truncate_history_thinking": False},
    "nemotron-3.5": {"truncate_history_thinking": False},
    "deepseek-v4": {"drop_thinking": False},
    "gpt-oss": {"auto_drop_analysis": False},
}
"""The option of a template that keeps reasoning of earlier turns, where the template has one."""
DROPS_THINKING = frozenset({"gpt-oss"})
"""Families whose option is the library's: the model's own template always drops earlier reasoning."""


OWN_TEMPLATE = "own-template"
"""The name of a family that the library does not have: the template lies beside the model's tokenizer."""


@dataclass(frozen=True)
class Family:
    """A chat template, by its name in the library `renderers`, and what it accepts."""

    name: str
    system: bool = True
    """The template renders a system message at the first position."""
    late_system: bool = True
    """The template renders a system message also after the first position."""
    opening_user: Literal["never", "always", "with_tools"] = "never"
    """When the template refuses a conversation that does not begin with a user message."""
    parallel_calls: bool = True
    """The template renders a message with several calls, and one with text beside its calls."""
    call_ids: bool = False
    """The template writes the ids of calls and of their results."""
    raw_arguments: bool = False
    """The template renders any text as a call's arguments. Others drop a text that is no JSON object."""
    loose_results: bool = True
    """The template renders a tool's result that answers no call."""
    named_results: bool = False
    """The template needs the tool's name in each result; OpenAI's API does not have it there."""
    nine_character_ids: bool = False
    """The template refuses ids of calls that do not have nine characters."""
    tools: bool = True
    """The template writes tools, calls and results."""
    calls: str | None = None
    """Of an own template: the family whose calls it writes; None if no parser of the library reads them."""
    text_calls: bool = False
    """Calls are written in ordinary text, not in tokens of their own."""
    switch: str | None = None
    """Of an own template: its option that turns thinking on and off."""
    thinks: bool = True
    """Of an own template: it has thoughts."""

    @property
    def syntax(self) -> str | None:
        """The family in whose syntax the template writes calls."""
        return self.calls if self.name == OWN_TEMPLATE else self.name


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen3", raw_arguments=True),
        *(Family(name, raw_arguments=True, call_ids=True) for name in ("kimi-k2", "kimi-k2.5")),
        *(Family(name, raw_arguments=True) for name in ("deepseek-v3", "deepseek-r1")),
        Family("qwen3-vl", late_system=False, raw_arguments=True),
        *(Family(name, late_system=False) for name in ("qwen3.5", "qwen3.6", "minimax-m2", "deepseek-v4")),
        *(Family(name, late_system=False) for name in ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5")),
        Family("qwen3.8", late_system=False, opening_user="always"),
        Family("llama-3", opening_user="with_tools", parallel_calls=False, raw_arguments=True),
        Family("gemma4", loose_results=False, named_results=True),
        Family("inkling", named_results=True),
        Family("gpt-oss", raw_arguments=True, named_results=True),
        *(Family(name) for name in ("prime-qwen3", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "hy3")),
        *(Family(name) for name in ("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1")),
    )
}


class ModelConfig(msgspec.Struct, frozen=True):
    """The few fields of a Hugging Face config.json that the gateway needs."""

    model_type: str = ""
    vocab_size: int = 0
    """0: config.json does not say it."""
    context_length: int = 0
    num_experts_per_tok: int | None = None

    def with_vocabulary(self, size: int) -> "ModelConfig":
        """The config, with the size of the tokenizer's vocabulary if config.json does not say it."""
        return msgspec.structs.replace(self, vocab_size=self.vocab_size or size)


def config_of(model_path: Path, context_length: int | None = None) -> ModelConfig:
    """The model's config. One that reads images has the fields of its text part in an object of their own.

    Raises SystemExit if it cannot be read, or if neither it nor the settings say the `context_length`.
    """
    file = model_path / CONFIG
    if not file.is_file():
        raise SystemExit(
            f"{file} does not exist: gateway.model_path is no directory in Hugging Face's format (`weir up` "
            "downloads a model by its name on the hub, and `hf download NAME --local-dir DIR` does)"
        )
    config = object_in(file)
    fields = text_config(config) | {"model_type": config.get("model_type")}
    named = next(filter(fields.get, CONTEXT_LENGTHS), CONTEXT_LENGTHS[0])
    experts = fields.get("num_experts_per_tok")
    for name in (named, "vocab_size"):
        if not isinstance(fields.get(name), int | None):
            raise SystemExit(f"{file}: {name} is {fields[name]!r}, and no whole number")
    if not (context_length := context_length or fields.get(named)):
        raise SystemExit(f"{file} names no {named}: set gateway.context_length")
    return ModelConfig(
        model_type=str(config.get("model_type") or ""),
        vocab_size=fields.get("vocab_size") or 0,
        context_length=context_length,
        num_experts_per_tok=experts if isinstance(experts, int) else None,
    )


def end_ids(model_path: Path, config: ModelConfig) -> list[int]:
    """The tokens at which an engine ends an answer: those of config.json and of generation_config.json.

    Raises SystemExit if they cannot be read.
    """
    whole, generation = object_in(model_path / CONFIG), object_in(model_path / GENERATION)
    said = [(CONFIG, part.get(ENDS)) for part in (text_config(whole), whole)]
    found: dict[int, None] = {}
    for name, ids in (*said, (GENERATION, generation.get(ENDS))):
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(each) is int for each in listed):
            raise SystemExit(
                f"{model_path / name}: {ENDS} is {ids!r}, and neither a token id nor a list of ids"
            )
        found |= dict.fromkeys(each for each in listed if 0 <= each < (config.vocab_size or MOST_IDS))
    return list(found)


def end_token(model_path: Path) -> str | None:
    """The tokenizer's own end, as text."""
    return named_tokens(tokenizer_settings(model_path)).get("eos_token")


def family_of(name: str, model_path: Path, model_type: str) -> Family:
    """The family of a name; for `auto`, of the model's directory name, else of the type in its config.json.

    A model whose family is not known has its own template. Raises SystemExit for an unknown name.
    """
    if name == "auto":
        by_model = {model.rpartition("/")[2]: family for model, family in MODEL_RENDERER_MAP.items()}
        found = by_model.get(model_path.name) or FAMILY_OF_MODEL_TYPE.get(model_type)
    else:
        found = name
    if found is None or found == OWN_TEMPLATE or (name == "auto" and found not in FAMILIES):
        return Family(OWN_TEMPLATE)
    if found not in FAMILIES:
        raise SystemExit(
            f"{name!r}: set gateway.renderer to one of {', '.join(sorted((*FAMILIES, OWN_TEMPLATE)))}"
        )
    return FAMILIES[found]


def configuration(family: Family, thinking: Thinking) -> Any:
    """The configuration for `renderers`: the template's own, or (`all`) one that keeps earlier reasoning.

    `auto` keeps it if the model's own template has an option for that: such a model learned from histories
    with reasoning.
    """
    own = config_from_name(family.name)
    if thinking == "auto":
        thinking = (
            "all" if family.name in KEEPS_THINKING and family.name not in DROPS_THINKING else "template"
        )
    if thinking == "template" or own is None:
        return own
    return type(own)(thinking_retention="all", **KEEPS_THINKING.get(family.name, {}))


def changed(current: Any, wanted: Any) -> tuple[tuple[str, Any], ...]:
    """The options by which the configuration `wanted` differs from `current`, sorted by name."""
    if wanted is None:  # a family without options
        return ()
    fields = wanted.model_dump().items()
    return tuple(sorted((name, value) for name, value in fields if getattr(current, name) != value))
