"""Finds the options of a chat template that turn a call's thinking on or off, or set its effort.

reasoning_effort, thinking, … ──dialect──▶ ThinkingChoice ──options_of──▶ {"enable_thinking": False}
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

from gateway.errors import invalid
from gateway.language.families import OWN_TEMPLATE, Family
from rollout_queue.contract.records import ReasoningEffort

EFFORTS: tuple[str, ...] = tuple(effort for effort in get_args(ReasoningEffort) if effort != "none")
"""Levels of effort in rising order."""
NEVER_THINK = frozenset({"llama-3", "deepseek-v3", "kimi-k2", "qwen3-vl"})
"""Families whose models do not think, or whose template does not affect it."""
SWITCHES = ("enable_thinking", "thinking")
"""The options that turn thinking on and off, by the templates' names for them."""
Options = tuple[tuple[str, bool | str | None], ...]
"""Options of a template, sorted by name."""


class ThinkingChoice(msgspec.Struct, frozen=True):
    """What a call asks of the model's thinking, in any dialect."""

    on: bool | None = None
    """None leaves it to the template."""
    effort: str | None = None
    budget: int | None = None
    """In tokens. It is only recorded, because no engine enforces it."""

    @property
    def asked(self) -> dict[str, Any]:
        """What the turn's sampling parameters say of it."""
        switch = None if self.on is None else "on" if self.on else "off"
        named = {"thinking": switch, "reasoning_effort": self.effort, "thinking_budget": self.budget}
        return {name: value for name, value in named.items() if value is not None}


def effort_of(effort: Any, param: str) -> ThinkingChoice:
    """The choice of a field that names an effort. Raises InvalidRequest for an unknown effort."""
    if effort is None:
        return ThinkingChoice()
    if effort == "none":
        return ThinkingChoice(on=False, effort="none")
    if effort not in EFFORTS:
        raise invalid(param, f"one of none, {', '.join(EFFORTS)}")
    return ThinkingChoice(on=True, effort=str(effort))


def options_of(family: Family, configuration: Any, chosen: ThinkingChoice, param: str) -> Options:
    """The options of the family's template that fulfil the choice.

    An effort without a level of its own gets the nearest level; without levels it only turns thinking on. A
    model that never thinks has one level, none. It serves any effort, and any budget: that is an upper limit.
    Raises InvalidRequest for a switch that the model does not have, such as thinking of a model without it.
    """
    if chosen.on is None:
        return ()
    levels = _levels(family.name, configuration)
    never = family.name in NEVER_THINK or not family.thinks
    switch = None if never else _switch(configuration)
    if family.name == OWN_TEMPLATE:
        switch = family.switch
    options: dict[str, bool | str] = {}
    if switch is not None:
        options[switch] = chosen.on
    elif never:
        if chosen.on and chosen.effort is None and chosen.budget is None:
            raise invalid(param, "this model does not think")
        return ()
    elif not chosen.on and (off := next((level for level in levels if level in ("no_think", "none")), None)):
        return (("reasoning_effort", off),)
    elif not chosen.on:
        raise invalid(param, "the thinking of this model cannot be turned off")
    graded = [level for level in levels if level in EFFORTS]
    if chosen.on and graded and (chosen.effort or "no_think" in levels):
        options["reasoning_effort"] = _nearest(chosen.effort or "high", graded)
    return tuple(sorted(options.items()))


def _switch(configuration: Any) -> str | None:
    fields: Mapping[str, Any] = getattr(type(configuration), "model_fields", {})
    return next((name for name in SWITCHES if name in fields), None)


def _levels(family: str, configuration: Any) -> Sequence[str]:
    field = getattr(type(configuration), "model_fields", {}).get("reasoning_effort")
    if field is None:
        return ()
    return ("none", *EFFORTS[:4], "max") if family == "inkling" else get_args(field.annotation)


def _nearest(effort: str, levels: Sequence[str]) -> str:
    """The level nearest to the effort; of two, the higher one."""
    rank = EFFORTS.index(effort)
    return min(levels, key=lambda level: (abs(EFFORTS.index(level) - rank), -EFFORTS.index(level)))
