"""What can be set of the way from log-probabilities to a loss, and the defaults: the preset `default`.

    Masks ─▶ Correction ─▶ Loss ─▶ + KL ─▶ Aggregation

Each family is one of several by its `name`; the name alone stands for it with its defaults.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from trainer_service.algorithms.corrections.settings import (
    Above0,
    Anchor,
    AtLeast0,
    Correction,
    Frozen,
    M2po,
    Mask,
    NoCorrection,
    Outlier,
    TisToken,
    Within,
    by_name,
)

CLIP_LOW = 0.2
CLIP_HIGH = 0.28
DUAL_CLIP = 3.0
GSPO_LOW = 3e-4
GSPO_HIGH = 4e-4
CISPO_LOW = 0.0
CISPO_HIGH = 5.0
SAPO_POSITIVE = 1.0
SAPO_NEGATIVE = 1.05
DPPO_LIMIT = 0.2
DPPO_RATIO_CAP = 20.0
IPO_LIMIT = 0.1
KAPPA = 1e-3
"""Of the square of the log-ratio that trust-region losses add to every token."""
GLM5_LIMIT = 0.2
GMPO_CLIP = 0.2
KL_COV_FRACTION = 2e-4
KL_COV_COEFFICIENT = 0.1
TEACHER_GAP = 0.2

Divergence = Literal["tv", "kl"]
Form = Literal["ratio", "logp"]
Share = Annotated[float, Field(gt=0, lt=1)]


class Ppo(Frozen):
    name: Literal["ppo"] = "ppo"
    clip_low: Share = CLIP_LOW
    clip_high: Above0 = CLIP_HIGH
    dual_clip: float | None = Field(DUAL_CLIP, gt=1)
    """Bounds the loss of a bad token that became likely, at this many times its advantage."""
    anchor: Anchor = "prox"


class Gspo(Frozen):
    name: Literal["gspo"] = "gspo"
    clip_low: Share = GSPO_LOW
    clip_high: Above0 = GSPO_HIGH
    anchor: Anchor = "prox"


class Gmpo(Frozen):
    name: Literal["gmpo"] = "gmpo"
    clip_low: Above0 = GMPO_CLIP
    """Nats: it clips log-ratios."""
    clip_high: Above0 = GMPO_CLIP
    anchor: Anchor = "prox"


class Cispo(Within):
    name: Literal["cispo"] = "cispo"
    low: AtLeast0 = CISPO_LOW
    high: Above0 = CISPO_HIGH
    anchor: Anchor = "prox"


class Reinforce(Frozen):
    """GPG is the same with its own advantage."""

    name: Literal["reinforce"] = "reinforce"


class ImportanceSampling(Frozen):
    name: Literal["importance_sampling"] = "importance_sampling"
    anchor: Anchor = "rollout"


class Sapo(Frozen):
    name: Literal["sapo"] = "sapo"
    tau_positive: Above0 = SAPO_POSITIVE
    tau_negative: Above0 = SAPO_NEGATIVE
    anchor: Anchor = "prox"


class Dppo(Frozen):
    name: Literal["dppo"] = "dppo"
    divergence: Divergence = "tv"
    form: Form = "ratio"
    """Both have the same gradient where no ratio exceeds `ratio_cap`; the value of `logp` says nothing."""
    low: Above0 = DPPO_LIMIT
    high: Above0 = DPPO_LIMIT
    ratio_cap: Above0 = DPPO_RATIO_CAP
    """Of the form `logp`."""
    kappa: AtLeast0 = 0.0
    anchor: Anchor = "rollout"


class Ipo(Frozen):
    name: Literal["ipo"] = "ipo"
    limit: Above0 = IPO_LIMIT
    kappa: AtLeast0 = KAPPA
    anchor: Anchor = "rollout"


class Glm5(Frozen):
    name: Literal["glm5"] = "glm5"
    low: Share = GLM5_LIMIT
    high: Above0 = GLM5_LIMIT
    anchor: Anchor = "rollout"


class Dro(Frozen):
    name: Literal["dro"] = "dro"
    beta: Above0
    anchor: Anchor = "rollout"


class KlCov(Frozen):
    name: Literal["kl_cov"] = "kl_cov"
    fraction: Share = KL_COV_FRACTION
    coefficient: AtLeast0 = KL_COV_COEFFICIENT
    anchor: Anchor = "prox"


class ReverseKl(Frozen):
    """Distillation on what the policy sampled itself: the teacher is the only judge."""

    name: Literal["reverse_kl"] = "reverse_kl"
    anchor: Anchor = "rollout"


class RefKl(Frozen):
    """The same, within a trust region."""

    name: Literal["ref_kl"] = "ref_kl"
    low: Above0 = TEACHER_GAP
    kappa: AtLeast0 = KAPPA
    anchor: Anchor = "rollout"


Loss = Annotated[
    Ppo
    | Gspo
    | Gmpo
    | Cispo
    | Reinforce
    | ImportanceSampling
    | Sapo
    | Dppo
    | Ipo
    | Glm5
    | Dro
    | KlCov
    | ReverseKl
    | RefKl,
    Field(discriminator="name"),
    BeforeValidator(by_name),
]


class Kl(Frozen):
    """The price of leaving the reference policy."""

    estimator: Literal["k1", "abs", "k2", "k3", "low_var", "k3_plus", "unbiased"] = "k3"
    coefficient: AtLeast0 = 0.0

    @model_validator(mode="after")
    def _pulls(self) -> "Kl":
        if self.coefficient and self.estimator == "k1":
            raise ValueError(
                "kl: the gradient of k1 is 1 wherever the policy stands; as a loss it pulls nowhere"
            )
        return self


class Aggregation(Frozen):
    """What each token counts in the sum over the optimizer step."""

    mode: Literal[
        "token_mean",
        "token_sum",
        "seq_mean_token_mean",
        "seq_mean_token_sum",
        "seq_mean_token_sum_norm",
        "prompt_mean",
        "rollout_mean",
        "fixed_denominator",
    ] = "token_mean"
    horizon: float | None = Field(None, gt=0)
    """Tokens: what `seq_mean_token_sum_norm` takes for the length of every row."""
    denominator: float | None = Field(None, gt=0)
    """Tokens: what `fixed_denominator` divides by."""

    @model_validator(mode="after")
    def _length_fits(self) -> "Aggregation":
        for mode, field in (("seq_mean_token_sum_norm", "horizon"), ("fixed_denominator", "denominator")):
            if (getattr(self, field) is not None) != (self.mode == mode):
                raise ValueError(f"aggregation: {field} belongs to {mode}, which needs it")
        return self


class LossSettings(Frozen):
    """One way from log-probabilities to a loss."""

    loss: Loss = Ppo()
    correction: Correction = TisToken()
    masks: tuple[Mask, ...] = (Outlier(),)
    """What leaves rows or tokens out of the loss. Those of rows apply before those of tokens."""
    kl: Kl = Kl()
    entropy_bonus: AtLeast0 = 0.0
    """What a nat of entropy is worth."""
    aggregation: Aggregation = Aggregation()

    @model_validator(mode="after")
    def _corrected_once(self) -> "LossSettings":
        if corrects_twice(self.loss, self.correction):
            raise ValueError(
                f"{self.loss.name} takes its ratio to the policy that sampled, and {self.correction.name} "
                "would correct for it a second time; set correction: none"
            )
        return self

    @property
    def whole_step(self) -> bool:
        """Whether `StepStatistics` of all micro-batches must be known before the first of them learns."""
        normalised = not isinstance(self.correction, NoCorrection) and self.correction.normalise
        return (
            normalised or isinstance(self.loss, KlCov) or any(isinstance(mask, M2po) for mask in self.masks)
        )

    @property
    def needs_reference(self) -> bool:
        return self.kl.coefficient > 0

    @property
    def needs_teacher(self) -> bool:
        return isinstance(self.loss, ReverseKl | RefKl)

    @property
    def needs_anchor(self) -> bool:
        """Whether what the step begins with matters; else `lp_prox_T` tells how far the engine is off."""
        corrected = not isinstance(self.correction, NoCorrection)
        anchored = not isinstance(self.loss, Reinforce) and self.loss.anchor == "prox"
        return (
            corrected
            or anchored
            or bool(self.masks)
            or (self.kl.estimator == "unbiased" and self.needs_reference)
        )


def corrects_twice(loss: Loss, correction: Correction) -> bool:
    """Whether loss and correction would both weigh the mismatch of trainer and engine (spec §3)."""
    weighed = not isinstance(loss, Reinforce) and loss.anchor == "rollout"
    return weighed and not isinstance(correction, NoCorrection)
