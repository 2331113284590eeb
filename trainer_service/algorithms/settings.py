"""How rewards become a loss, and what one optimizer step holds: section `trainer.algorithm` of weir.yaml.

preset ─▶ defaults of all the rest ◀── what is set beside it, which wins

Rollouts ─ shaping ─ advantage ─▶ rows ─ masks, correction, loss, kl, aggregation ─▶ one step
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from trainer_service.algorithms.advantages.advantages import ADVANTAGES
from trainer_service.algorithms.advantages.returns import RETURNS
from trainer_service.algorithms.advantages.settings import (
    TOKEN_LEVEL,
    ZERO_VARIANCE,
    Advantage,
    Plain,
    ShapingSettings,
    contradiction,
)
from trainer_service.algorithms.corrections.settings import NoCorrection
from trainer_service.algorithms.losses.settings import KlCov, LossSettings

PRESETS = Path(__file__).with_name("presets")
"""One YAML file each; `presets/default.yaml` says what no preset says."""


class AlgorithmSettings(LossSettings):
    """The default is for agents, asynchronous by up to eight versions."""

    preset: str = "default"
    """The recipe that all other fields of this section default to."""
    advantage: Advantage = Plain()
    """How the rewards of rollouts, or of tokens, become advantages."""
    advantage_bound: float | None = Field(None, gt=0)
    """Advantages are clipped to ± this."""
    shaping: ShapingSettings = ShapingSettings()
    """What is done to rewards before they are compared; `truncated` says what becomes of sessions that their
    agent finished so."""
    zero_variance: float = Field(ZERO_VARIANCE, ge=0)
    """Where members of a group are compared, one whose rewards span no more than this teaches nothing."""
    prox: Literal["reuse", "recompute", "loglinear"] = "reuse"
    """What the step begins with, as ratios need it: the learning pass itself, where a batch makes one step; a
    pass of its own; or a guess between what sampled a token and what learns from it."""
    epochs: int = Field(1, ge=1)
    """Optimizer steps over one batch; beyond one, a pass before the first tells what it begins with."""
    min_live_rows: int = Field(16, ge=1)
    """A step waits for this many rows with an advantage: Adam steps as far on one noisy group as on many."""
    max_rows: int = Field(256, ge=1)
    max_tokens: int = Field(1024, ge=1)
    """Tokens that one forward pass holds; a longer row is a pass of its own."""
    max_staleness: int = Field(8, ge=0)
    """Versions between a sampled token and the trainer that learns from it. 0 is synchronous training."""
    stale: Literal["drop", "mask", "correct", "wait", "auto"] = "drop"
    """What becomes of older ones. drop: their rollout is not trained; mask: they have no part in the loss,
    the newer tokens of their rollout do; correct: they are trained, at the weight that the correction leaves
    them; wait: no step is made that would make a rollout under way too old, and what is too old all the same
    is dropped; auto: correct while the last step's measures are good, else mask."""
    auto_min_ess: float = Field(0.5, ge=0, le=1)
    """For auto: the smallest good share of effective samples, `mismatch/ess`."""
    auto_max_kl: float = Field(0.1, gt=0)
    """For auto: the largest good divergence of trainer and engine in nats, `mismatch/k3`."""
    streaming: bool = True
    """Learn from whole groups while the step waits for others, where the recipe allows it: `learns_early`."""
    flush_after_s: float | None = Field(None, gt=0)
    """Step with fewer rows when the stream was silent this long; None waits for `min_live_rows`."""
    group_wait_s: float = Field(3600.0, gt=0)
    """A group that heard nothing for this long goes on without the members that never came."""
    group_deadline_s: float | None = Field(None, gt=0)
    """A group goes on without its stragglers this long after its first member ended with a reward; None waits
    for all of them, or for `group_wait_s` of silence. What a straggler brings later is not trained."""
    group_min_size: int = Field(2, ge=2)
    """Rewarded members that a deadline needs; one alone compares with nobody, and would end the others for
    nothing."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return _merged(preset(given.get("preset", "default")), given)

    @model_validator(mode="after")
    def _makes_sense(self) -> "AlgorithmSettings":
        if reason := contradiction(self.advantage, self.shaping):
            raise ValueError(reason)
        if self.min_live_rows > self.max_rows:
            raise ValueError(
                f"min_live_rows: {self.min_live_rows} are more than a step holds, max_rows: {self.max_rows}"
            )
        if self.needs_teacher and (unheard := self._of_rewards()):
            raise ValueError(f"{unheard}: loss {self.loss.name} looks at no reward")
        if self.shaping.kl_in_reward and self.kl.coefficient:
            raise ValueError("shaping.kl_in_reward: kl.coefficient prices the same divergence already")
        if self.epochs == 1 and self.prox == "reuse" and isinstance(self.loss, KlCov):
            raise ValueError(
                "loss: kl_cov holds tokens to what the step begins with, where they all are with one epoch; "
                "set epochs"
            )
        if self.stale in ("correct", "auto") and not self.corrects:
            raise ValueError(
                f"stale: {self.stale} trains old tokens at the weight of a correction, and there is none; "
                "set a correction, or a loss with anchor: rollout"
            )
        if self.stale in ("correct", "auto") and self.max_staleness == 0:
            raise ValueError(
                f"stale: {self.stale} may train what older versions sampled, and max_staleness: 0 is to "
                "train what the present one did; set drop, mask or wait"
            )
        if self.prox == "loglinear" and not self.needs_anchor:
            raise ValueError("prox: loglinear guesses what nothing here asks for; leave it out")
        if self.prox == "loglinear" and (self.epochs > 1 or self.whole_step):
            raise ValueError(
                "prox: loglinear guesses what a pass before the step knows, and the step needs that pass: "
                "set prox: recompute"
            )
        return self

    def _of_rewards(self) -> str | None:
        """The first setting that only means something where rewards do."""
        shaping = self.shaping
        told = {
            f"advantage {self.advantage.name}": self.advantage != Plain(),
            "shaping.overlong": shaping.overlong is not None,
            "shaping.length_penalty": shaping.length_penalty is not None,
            "shaping.turn_discount": shaping.turn_discount is not None,
            "shaping.kl_in_reward": shaping.kl_in_reward > 0,
        }
        return next((name for name, is_set in told.items() if is_set), None)

    @property
    def compares(self) -> bool:
        """Whether members of a group are compared, so that one without variance teaches nothing."""
        if self.needs_teacher or self.advantage.name in TOKEN_LEVEL:
            return False
        return ADVANTAGES[self.advantage.name].compares

    @property
    def credits_tokens(self) -> bool:
        """Whether each token has an advantage of its own, which only the whole step can tell."""
        return not self.needs_teacher and self.advantage.name in TOKEN_LEVEL

    @property
    def needs_critic(self) -> bool:
        return self.credits_tokens and "values" in RETURNS[self.advantage.name].needs

    @property
    def corrects(self) -> bool:
        """Whether the loss knows that another policy sampled."""
        anchored = getattr(self.loss, "anchor", "prox") == "rollout"
        return anchored or not isinstance(self.correction, NoCorrection)

    def after(self, measured: Mapping[str, float]) -> "AlgorithmSettings":
        """The same, with `auto` resolved by what the last step measured."""
        if self.stale != "auto":
            return self
        good = (
            measured.get("mismatch/ess", 1.0) >= self.auto_min_ess
            and measured.get("mismatch/k3", 0.0) <= self.auto_max_kl
        )
        return self.model_copy(update={"stale": "correct" if good else "mask"})

    @property
    def looks_first(self) -> bool:
        """Whether a pass over the whole batch precedes the first that learns."""
        return (
            self.prox == "recompute"
            or self.epochs > 1
            or self.whole_step
            or (self.credits_tokens and self.shaping.kl_in_reward > 0)
        )

    @property
    def learns_early(self) -> bool:
        """Whether a group is learned from before the others of its step are known."""
        if not self.streaming or self.needs_teacher or self.credits_tokens or self.whole_step:
            return False
        return not (ADVANTAGES[self.advantage.name].whole_step or getattr(self.advantage, "whiten", False))

    @property
    def wants_reference(self) -> bool:
        return self.needs_reference or self.shaping.kl_in_reward > 0


def _merged(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """What is given wins, field by field, also within one of the same name."""
    merged = dict(defaults)
    for field, value in given.items():
        before = merged.get(field)
        merged[field] = value
        if isinstance(before, dict) and isinstance(value, dict):
            same = value.get("name", before.get("name")) == before.get("name")
            merged[field] = before | value if same else value
    return merged


def preset(name: str) -> dict[str, Any]:
    """The fields that a preset sets. Raises ValueError for one that nobody knows."""
    known = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    if name not in known:
        raise ValueError(f"preset {name!r} is none of {', '.join(known)}")
    fields: dict[str, Any] = yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))
    return fields
