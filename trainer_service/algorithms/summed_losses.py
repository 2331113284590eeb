"""The losses of a user's own loop. Each is a plain sum over targets and datums, and never a mean.

name, settings ─ chosen_loss ─▶ SummedLoss ─ losses(lp, inputs, rows) ─▶ one loss per target

lp is log p of each target under the trained weights; q is `logprobs`, as sampled; r = exp(lp - q), which is
not bounded here. The formulas are those of `turn_losses.py`.

TurnLoss has the losses of the training by turns that a user's own loop may ask for by the same names. They
are those whose plain sum over targets has a meaning, and which leave a target with advantage 0 alone: loops
give prompts this advantage. Both the policy before the step and the one that sampled are `logprobs`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from trainer_service.algorithms.tokens import RowIndex, Tokens
from trainer_service.algorithms.turn_losses import (
    Dppo,
    Glm5,
    PolicyLossFormula,
    Reinforce,
    Sapo,
    StepStatistics,
    clipped_surrogate,
    optimistic,
    weighted_logprob,
)

Inputs = Mapping[str, Tensor]
Config = Mapping[str, Any]
"""Settings by name: numbers, for some losses also text."""
CLIPS = ("clip_low_threshold", "clip_high_threshold")
"""The settings of bounds of a ratio. They are bounds of the ratio itself, not of its distance from 1."""
SAMPLED = ("logprobs", "advantages")
"""The inputs of a loss that learns from sampled tokens."""
RATIO_MASK = "sequence_ratio_mask"
NOT_OFFERED = {
    "stable_reinforce": "its formula is not published. Ask for `ppo` instead: in tinker-cookbook, set "
    '`loss_fn="ppo"` (for asynchronous training in `AsyncConfig`)'
}
"""Known losses that are refused, and what the refusal says."""
NOT_SETTINGS = {
    "name",
    "anchor",  # there is one policy that a ratio can have in its denominator
    "kappa",  # it pulls targets with advantage 0
}
"""The fields of a loss of the training by turns that a user's loop cannot set."""


class LossRefused(Exception):
    """A loss does not exist, or was asked for with wrong settings or inputs. The message is for the user."""


@dataclass(frozen=True)
class SummedLoss:
    """A loss with its settings."""

    name: str
    inputs: tuple[str, ...]
    """The names of the numbers that it needs for each target."""
    config: Config
    of_targets: Callable[[Tensor, Inputs, Tensor, Config], Tensor]
    soft: bool
    """Whether a position may have several targets."""

    def losses(self, lp_TK: Tensor, inputs: Inputs, rows_T: Tensor) -> Tensor:
        """[T, K]: the loss of each target; its sum is the loss. `lp_TK` and each of `inputs` are [T, K];
        `rows_T` has the number of each position's datum, whose positions are all here."""
        return self.of_targets(lp_TK, inputs, rows_T, self.config)


@dataclass(frozen=True)
class SummedLossKind:
    """What `chosen_loss` makes a SummedLoss of."""

    inputs: tuple[str, ...]
    defaults: Mapping[str, float | str | None]
    """The settings by name; a setting without a default is required."""
    of_targets: Callable[[Tensor, Inputs, Tensor, Config], Tensor]
    soft: bool = False


def cross_entropy(lp_TK: Tensor, inputs: Inputs, _rows_T: Tensor, _config: Config) -> Tensor:
    """-w lp, for any real w."""
    return -inputs["weights"] * lp_TK


def importance_sampling(lp_TK: Tensor, inputs: Inputs, _rows_T: Tensor, _config: Config) -> Tensor:
    """-r A."""
    return -_ratios(lp_TK, inputs) * inputs["advantages"]


def ppo(lp_TK: Tensor, inputs: Inputs, _rows_T: Tensor, config: Config) -> Tensor:
    """-min(r A, clip(r) A)."""
    return _clipped(_ratios(lp_TK, inputs), inputs["advantages"], config)


def cispo(lp_TK: Tensor, inputs: Inputs, _rows_T: Tensor, config: Config) -> Tensor:
    """-clip(r) lp A, where the clipped ratio has no gradient."""
    low, high = (config[each] for each in CLIPS)
    ratios_TK = _ratios(lp_TK.detach(), inputs).clamp(low, high)
    return weighted_logprob(ratios_TK, inputs["advantages"], lp_TK)


def gspo(lp_TK: Tensor, inputs: Inputs, rows_T: Tensor, config: Config) -> Tensor:
    """-min(s A, clip(s) A). s is exp of the mean of lp - q over the datum's targets with mask 1 (1 without
    any). All targets of a datum have its value, and each the gradient of its own lp (GSPO-token,
    arXiv:2507.18071)."""
    counts_TK = inputs[RATIO_MASK].to(lp_TK.dtype)
    differences_TK = torch.where(counts_TK > 0, lp_TK.detach() - inputs["logprobs"], 0.0)
    rows = RowIndex.of(rows_T)
    totals_R, counts_R = rows.sum(differences_TK.sum(1)), rows.sum(counts_TK.sum(1))
    means_T = rows.at_tokens(totals_R / counts_R.clamp(min=1))
    ratios_TK = torch.exp(means_T[:, None] + (lp_TK - lp_TK.detach()))
    return _clipped(ratios_TK, inputs["advantages"], config)


def dro(lp_TK: Tensor, inputs: Inputs, _rows_T: Tensor, config: Config) -> Tensor:
    """-(lp A - beta/2 (lp - q)^2) (arXiv:2405.19107)."""
    return optimistic(lp_TK, inputs["logprobs"], inputs["advantages"], config["beta"])


@dataclass(frozen=True)
class TurnLoss:
    """A loss of the training by turns. It is sent to all ranks."""

    kind: type[PolicyLossFormula]

    @property
    def defaults(self) -> dict[str, float | str]:
        """The settings by name."""
        fields = self.kind.model_fields
        return {each: field.default for each, field in fields.items() if each not in NOT_SETTINGS}

    def chosen(self, config: Config) -> PolicyLossFormula:
        """Raises LossRefused."""
        try:
            return self.kind.model_validate(dict(config))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            setting = ".".join(map(str, first["loc"]))
            said = f"{setting} {config.get(setting)!r}: {first['msg']}"
            raise LossRefused(f"loss {self.kind.model_fields['name'].default}: {said}") from error

    def __call__(self, lp_TK: Tensor, inputs: Inputs, rows_T: Tensor, config: Config) -> Tensor:
        """[T, 1]: the loss of each target."""
        sampled_T = inputs["logprobs"][:, 0]
        tokens = Tokens(lp_TK[:, 0], sampled_T, sampled_T, inputs["advantages"][:, 0], rows_T)
        return self.chosen(config).losses(tokens, StepStatistics()).loss_T[:, None]


TURN_LOSSES: Mapping[str, type[PolicyLossFormula]] = {
    "reinforce": Reinforce,
    "sapo": Sapo,
    "dppo": Dppo,
    "glm5": Glm5,
}


SUMMED_LOSSES: Mapping[str, SummedLossKind] = {
    "cross_entropy": SummedLossKind(("weights",), {}, cross_entropy, soft=True),
    "importance_sampling": SummedLossKind(SAMPLED, {}, importance_sampling),
    "ppo": SummedLossKind(SAMPLED, dict(zip(CLIPS, (0.8, 1.2), strict=True)), ppo),
    "cispo": SummedLossKind(SAMPLED, dict(zip(CLIPS, (0.0, 4.0), strict=True)), cispo),
    "gspo": SummedLossKind((*SAMPLED, RATIO_MASK), dict(zip(CLIPS, (1 - 3e-4, 1 + 4e-4), strict=True)), gspo),
    "dro": SummedLossKind(SAMPLED, {"beta": None}, dro),
    **{
        name: SummedLossKind(SAMPLED, TurnLoss(kind).defaults, TurnLoss(kind))
        for name, kind in TURN_LOSSES.items()
    },
}


def chosen_loss(name: str, config: Mapping[str, float | str]) -> SummedLoss:
    """The loss with this name, with the settings of a caller. Raises LossRefused."""
    kind = SUMMED_LOSSES.get(name)
    if kind is None:
        reason = f": {NOT_OFFERED[name]}" if name in NOT_OFFERED else ""
        raise LossRefused(f"loss {name} is not offered{reason}. The losses are {_list(SUMMED_LOSSES)}")
    if unknown := sorted(set(config) - set(kind.defaults)):
        known = f"its settings are {_list(kind.defaults)}" if kind.defaults else "it has no settings"
        raise LossRefused(f"loss {name} has no setting {_list(unknown)}; {known}")
    given: Config = {each: _value(name, each, value, kind.defaults[each]) for each, value in config.items()}
    chosen: Config = {**{each: value for each, value in kind.defaults.items() if value is not None}, **given}
    if missing := sorted(set(kind.defaults) - set(chosen)):
        raise LossRefused(f"loss {name} needs the setting {_list(missing)}, which has no default")
    if set(CLIPS) <= set(chosen) and chosen[CLIPS[0]] > chosen[CLIPS[1]]:
        raise LossRefused(
            f"loss {name}: {CLIPS[0]} {chosen[CLIPS[0]]} is above {CLIPS[1]} {chosen[CLIPS[1]]}"
        )
    if isinstance(kind.of_targets, TurnLoss):
        kind.of_targets.chosen(chosen)
    return SummedLoss(name, kind.inputs, chosen, kind.of_targets, kind.soft)


def check_inputs(loss: SummedLoss, given: Collection[str], k: int) -> None:
    """Raises LossRefused unless a datum with these inputs and `k` targets for each position is one for this
    loss."""
    if missing := [each for each in loss.inputs if each not in given]:
        raise LossRefused(f"loss {loss.name} needs {_list(missing)} for each target")
    if superfluous := sorted(set(given) - set(loss.inputs)):
        raise LossRefused(f"loss {loss.name} takes {_list(loss.inputs)}, and not {_list(superfluous)}")
    if k > 1 and not loss.soft:
        soft = _list(each for each, kind in SUMMED_LOSSES.items() if kind.soft)
        raise LossRefused(f"loss {loss.name} takes one target for each position, not {k}; several: {soft}")


def _value(loss: str, setting: str, value: float | str, default: float | str | None) -> float | str:
    if isinstance(default, str):
        if isinstance(value, str):
            return value
        raise LossRefused(f"loss {loss}: {setting} must be text, not {value!r}")
    if isinstance(value, str) or not math.isfinite(value):
        raise LossRefused(f"loss {loss}: {setting} must be a finite number, not {value!r}")
    return float(value)


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"`{each}`" for each in names)


def _ratios(lp_TK: Tensor, inputs: Inputs) -> Tensor:
    return torch.exp(lp_TK - inputs["logprobs"])


def _clipped(ratios_TK: Tensor, advantages_TK: Tensor, config: Config) -> Tensor:
    low, high = (config[each] for each in CLIPS)
    return torch.maximum(*clipped_surrogate(ratios_TK, advantages_TK, low, high))
