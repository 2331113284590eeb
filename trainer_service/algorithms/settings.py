"""The settings section `trainer.algorithm`: how rewards become a loss, and how large a step is.

preset ─▶ defaults of all other fields ◀── fields that the user sets override them

Rollouts ─ shaping ─ advantage ─▶ rows ─ masks, correction, loss, kl, aggregation ─▶ one step
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainer_service.algorithms.advantages import Advantage, Drgrpo, contradiction
from trainer_service.algorithms.policy_loss import LossSettings
from trainer_service.algorithms.returns import TokenAdvantage
from trainer_service.algorithms.rollouts import ZERO_VARIANCE, ShapingSettings
from trainer_service.algorithms.turn_losses import KlCov


class CurriculumSettings(BaseModel):
    """How pass rates are measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    pass_reward: float = 0.5
    """A rollout passes if its reward is at least this."""
    memory: int = Field(32, ge=1)
    """Over about how many of its last rollouts the pass rate of a task is a mean."""


def smoothed(passed: float, rollouts: float) -> float:
    """The pass rate by Laplace's rule of succession: 1/2 before the first rollout, and never 0 or 1."""
    return (passed + 1) / (rollouts + 2)


def learnability(pass_rate: float) -> float:
    """The variance of passing, relative to its largest value: 1 at a rate of 1/2, 0 at rates of 0 and 1
    (2502.12272)."""
    return 4 * pass_rate * (1 - pass_rate)


PRESETS: Mapping[str, dict[str, object]] = yaml.safe_load(
    Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8")
)
"""The fields that each preset sets."""
CPU_TOKENS = 1024
"""The tokens of a micro-batch on CPU, which does not get faster with more."""


class AlgorithmSettings(LossSettings):
    """The defaults are for agents, with rollouts that are up to eight versions old."""

    preset: str = "default"
    """The name of the recipe that gives the other fields of this section their defaults."""
    advantage: Advantage = Drgrpo()
    """How the rewards of rollouts, or of tokens, become advantages."""
    advantage_bound: float | None = Field(None, gt=0)
    """Advantages are clipped to ± this value; None does not clip."""
    shaping: ShapingSettings = ShapingSettings()
    """How rewards change before they are compared. `truncated` applies to sessions that their agent ended as
    truncated."""
    zero_variance: float = Field(ZERO_VARIANCE, ge=0)
    """If the estimator compares members, a group whose rewards differ by at most this is not trained."""
    prox: Literal["reuse", "recompute", "loglinear"] = "reuse"
    """How the trainer gets the log-probabilities under the weights before the step. reuse: it takes those of
    the pass that computes the gradient; a batch that makes several steps still gets an extra forward pass.
    recompute: it always makes an extra forward pass. loglinear: it interpolates between the engine's
    log-probabilities and those of the pass that computes the gradient."""
    epochs: int = Field(1, ge=1)
    """How many passes learn from one batch. If several do, an extra forward pass precedes the first."""
    mini_batches: int = Field(1, ge=1)
    """How many optimizer updates one pass over a batch makes, each with the loss of other groups alone (PPO,
    arXiv:1707.06347, normalised as in verl). A batch of fewer groups is split by rollouts."""
    min_live_rows: int = Field(16, ge=1)
    """A step waits for this many rows with an advantage. A step on one noisy group would be as large as a
    step on many groups, because Adam divides a gradient by its usual size."""
    max_rows: int = Field(256, ge=1)
    intake: Literal["newest", "oldest", "bounded"] = "newest"
    """Which complete groups a step takes first. If more arrive than are trained, `oldest` trains all of them
    at an age of `max_staleness`, and `newest` at the youngest age: the others get too old meanwhile, and end
    as skipped_for_newer. `bounded` takes the oldest of the `max_waiting_groups` newest groups; the others end
    at once as skipped_for_newer."""
    max_waiting_groups: int = Field(64, ge=1)
    """For `bounded`: how many complete groups may wait. More wait only as long as they do not fill a step."""
    replay_share: float = Field(0.0, ge=0, lt=1)
    """For `newest`: up to this share of a step are the oldest groups that wait. No token is trained twice."""
    curriculum: CurriculumSettings | None = None
    """If set, groups of tasks that the policy sometimes solves are taken before the others."""
    max_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """The largest number of tokens in a micro-batch. A longer row is packed alone. auto: on a GPU, what fits
    into its memory, at most 16384; on CPU 1024."""
    max_row_tokens: int | None = Field(None, ge=1)
    """A rollout with a longer row is not trained. None: no bound."""
    max_staleness: int = Field(8, ge=0)
    """The largest number of versions between the weights that sampled a token and the weights that learn from
    it. 0 is synchronous training."""
    stale: Literal["drop", "mask", "correct", "wait", "auto"] = "drop"
    """How tokens older than `max_staleness` are handled. drop: their whole rollout is not trained. mask: the
    loss leaves these tokens out, and keeps the newer tokens of the rollout. correct: these tokens are trained
    with the weight of the correction. wait: the trainer delays a step that would make an unfinished rollout
    too old; a rollout that is too old all the same is dropped. auto: correct if the last step's metrics are
    within `auto_min_ess` and `auto_max_kl`, otherwise mask."""
    auto_min_ess: float = Field(0.5, ge=0, le=1)
    """For auto: the smallest allowed effective sample size, `mismatch/ess`."""
    auto_max_kl: float = Field(0.1, gt=0)
    """For auto: the largest allowed divergence of trainer and engine in nats, `mismatch/k3`."""
    router_aux_loss: float = Field(0.0, ge=0)
    """Mixtures of experts: the coefficient of the auxiliary loss, which makes the load of experts even. It
    needs an extra forward pass."""
    streaming: bool = True
    """Learn from complete groups while the step waits for others, if `learns_early` allows it."""
    flush_after_s: float | None = Field(None, gt=0)
    """After this time without a new record, make a step with fewer rows. None: wait for `min_live_rows`."""
    group_wait_s: float = Field(3600.0, gt=0)
    """A group that got no record for this long is scored without the members that sent no record at all."""
    group_deadline_s: float | None = Field(None, gt=0)
    """When this time has passed since the first member ended with a reward, the group is scored without its
    unfinished members, which are not trained later. None: it waits for every member that sent a record."""
    group_min_size: int = Field(2, ge=2)
    """The number of rewarded members that a group needs for `group_deadline_s` to apply."""
    over_sampling: float = Field(0.0, ge=0, lt=1)
    """The share of a group's members that it does not need: it is scored with those that end first with a
    reward, at least `group_min_size`. The others are not trained."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return _merged(preset(given.get("preset", "default")), given)

    @model_validator(mode="after")
    def _is_consistent(self) -> "AlgorithmSettings":
        if reason := contradiction(self.advantage, self.shaping):
            raise ValueError(reason)
        if self.min_live_rows > self.max_rows:
            raise ValueError(
                f"min_live_rows: {self.min_live_rows} are more than a step holds, max_rows: {self.max_rows}"
            )
        if self.replay_share and self.intake != "newest":
            raise ValueError(f"replay_share: intake {self.intake} takes the oldest groups anyway; set newest")
        if not self.loss.uses_advantages and (unused := self._reward_setting()):
            raise ValueError(f"{unused}: loss {self.loss.name} does not use rewards")
        if self.shaping.kl_in_reward and self.kl.coefficient:
            raise ValueError("shaping.kl_in_reward: kl.coefficient penalises the same divergence already")
        if self.kl.reference_every_steps is not None and not self.needs_reference_logprobs:
            raise ValueError("kl.reference_every_steps: nothing uses the reference; set kl.coefficient")
        if self.mini_batches > self.min_live_rows:
            raise ValueError(
                f"mini_batches: {self.mini_batches} are more than the rows that a step waits for, "
                f"min_live_rows: {self.min_live_rows}"
            )
        if not self.repeats and self.prox == "reuse" and isinstance(self.loss, KlCov):
            raise ValueError(
                "loss: kl_cov penalises the distance from the weights before the step, which is 0 with one "
                "update; set epochs or mini_batches"
            )
        if self.stale in ("correct", "auto") and not self.corrects:
            raise ValueError(
                f"stale: {self.stale} trains old tokens with the weight of a correction, and there is none; "
                "set a correction, or a loss with anchor: rollout"
            )
        if self.stale in ("correct", "auto") and self.max_staleness == 0:
            raise ValueError(
                f"stale: {self.stale} may train tokens of older versions, and max_staleness: 0 allows only "
                "those of the present one; set drop, mask or wait"
            )
        if self.prox == "loglinear" and not self.needs_anchor:
            raise ValueError("prox: loglinear computes lp_prox, which no setting here needs; leave it out")
        if self.prox == "loglinear" and (self.repeats or self.whole_step):
            raise ValueError(
                "prox: loglinear approximates what a pass before the step computes, and the step needs that "
                "pass: set prox: recompute"
            )
        return self

    def _reward_setting(self) -> str | None:
        """The first setting that is only useful with rewards; None if there is none."""
        shaping = self.shaping
        given = {
            f"advantage {self.advantage.name}": self.advantage != Drgrpo(),
            "shaping.overlong": shaping.overlong is not None,
            "shaping.length_penalty": shaping.length_penalty is not None,
            "shaping.turn_discount": shaping.turn_discount is not None,
            "shaping.kl_in_reward": shaping.kl_in_reward > 0,
        }
        return next((name for name, is_set in given.items() if is_set), None)

    @property
    def compares(self) -> bool:
        """Whether the members of a group are compared, so that a group with equal rewards is not trained."""
        return self.loss.uses_advantages and self.advantage.compares

    @property
    def credits_tokens(self) -> bool:
        """Whether each token has its own advantage, which depends on the whole step."""
        return self.loss.uses_advantages and isinstance(self.advantage, TokenAdvantage)

    @property
    def needs_critic(self) -> bool:
        return self.loss.uses_advantages and self.advantage.needs_values

    @property
    def repeats(self) -> bool:
        """Whether a step makes several optimizer updates."""
        return self.epochs > 1 or self.mini_batches > 1

    @property
    def micro_batch_tokens(self) -> int:
        """`max_tokens`. An `auto` that `sizing.resolved` has not replaced is taken as on CPU."""
        return CPU_TOKENS if self.max_tokens == "auto" else self.max_tokens

    def after(self, measured: Mapping[str, float]) -> "AlgorithmSettings":
        """These settings with `stale: auto` resolved by the metrics of the last step."""
        if self.stale != "auto":
            return self
        within_limits = (
            measured.get("mismatch/ess", 1.0) >= self.auto_min_ess
            and measured.get("mismatch/k3", 0.0) <= self.auto_max_kl
        )
        return self.model_copy(update={"stale": "correct" if within_limits else "mask"})

    def oldest_allowed(self, version: int) -> int:
        """The oldest version whose tokens are not too old for a step that begins with `version`.

            drop, wait   a rollout is not trained if its oldest token is older
            mask         a rollout is not trained if its newest token is older; the loss leaves out each token
                         that is older
            correct      all rollouts and tokens are trained, with the weight of the correction

        A group that steps pass over for newer ones ends when its youngest rollout is too old; with `correct`
        as with `drop`, because nothing else bounds how long such a group waits. With `wait`, no step is made
        that would make an unfinished session too old."""
        return version - self.max_staleness

    def deciding(self, oldest: int, newest: int) -> int:
        """The version by which a rollout is judged that versions `oldest` to `newest` have sampled."""
        return newest if self.stale == "mask" else oldest

    def with_kl_coefficient(self, coefficient: float) -> "AlgorithmSettings":
        return self.model_copy(update={"kl": self.kl.model_copy(update={"coefficient": coefficient})})

    @property
    def needs_pre_pass(self) -> bool:
        """Whether a forward pass over the whole batch precedes the first pass that learns."""
        return (
            self.prox == "recompute"
            or self.repeats
            or self.whole_step
            or (self.credits_tokens and self.shaping.kl_in_reward > 0)
            or self.router_aux_loss > 0
        )

    @property
    def learns_early(self) -> bool:
        """Whether groups can be learned from before the other groups of their step are known."""
        if not self.streaming or self.loss.needs_teacher or self.whole_step:
            return False
        if self.router_aux_loss or self.mini_batches > 1:
            return False
        if isinstance(self.advantage, TokenAdvantage):
            return False
        return not (self.advantage.whole_step or self.advantage.whitens)

    @property
    def needs_reference_logprobs(self) -> bool:
        """Whether the loss or the reward needs log-probabilities of the reference policy."""
        return self.needs_reference or self.shaping.kl_in_reward > 0


def _merged(defaults: dict[str, object], given: dict[str, object]) -> dict[str, object]:
    """Defaults overridden by given fields; two mappings with the same `name` are merged field by field."""
    merged = dict(defaults)
    for field, value in given.items():
        before = merged.get(field)
        merged[field] = value
        if isinstance(before, dict) and isinstance(value, dict):
            same = value.get("name", before.get("name")) == before.get("name")
            merged[field] = before | value if same else value
    return merged


def preset(name: str) -> dict[str, object]:
    """The fields that a preset sets, as presets.yaml has them. Raises ValueError for an unknown preset."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known are {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
