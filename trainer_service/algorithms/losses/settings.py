"""The settings that make a loss of log-probabilities, with the defaults of the preset `default`.

    Masks ─▶ Correction ─▶ Loss ─▶ + KL ─▶ Aggregation

Masks, correction and loss are each chosen by `name`. A name alone selects that choice with its defaults.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from trainer_service.algorithms.corrections.settings import (
    Above0,
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
from trainer_service.algorithms.losses.terms import Aggregation, Kl
from trainer_service.algorithms.tokens import Anchor

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
"""The coefficient of the squared log-ratio that trust-region losses add for every token."""
GLM5_LIMIT = 0.2
GMPO_CLIP = 0.2
KL_COV_FRACTION = 2e-4
KL_COV_COEFFICIENT = 0.1
TEACHER_GAP = 0.2
TOP_K = 16

Divergence = Literal["tv", "kl"]
Form = Literal["ratio", "logp"]
Share = Annotated[float, Field(gt=0, lt=1)]
TopK = Annotated[int, Field(ge=1, le=128)]
"""How many tokens a teacher tells at each place. More would take much memory and time to read."""


class Ppo(Frozen):
    name: Literal["ppo"] = "ppo"
    clip_low: Share = CLIP_LOW
    clip_high: Above0 = CLIP_HIGH
    dual_clip: float | None = Field(DUAL_CLIP, gt=1)
    """The loss of a token with a negative advantage is at most this many times |advantage|; null: no
    bound."""
    anchor: Anchor = "prox"


class Gspo(Frozen):
    name: Literal["gspo"] = "gspo"
    clip_low: Share = GSPO_LOW
    clip_high: Above0 = GSPO_HIGH
    anchor: Anchor = "prox"


class Gmpo(Frozen):
    name: Literal["gmpo"] = "gmpo"
    clip_low: Above0 = GMPO_CLIP
    """In nats: log-ratios are clipped."""
    clip_high: Above0 = GMPO_CLIP
    anchor: Anchor = "prox"


class Cispo(Within):
    name: Literal["cispo"] = "cispo"
    low: AtLeast0 = CISPO_LOW
    high: Above0 = CISPO_HIGH
    anchor: Anchor = "prox"


class Reinforce(Frozen):
    """With the advantage `gpg`, this is GPG."""

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
    """Both forms have the same gradient for ratios up to `ratio_cap`. The value of the loss has no meaning in
    the form `logp`."""
    low: Above0 = DPPO_LIMIT
    high: Above0 = DPPO_LIMIT
    ratio_cap: Above0 = DPPO_RATIO_CAP
    """The largest ratio in the form `logp`."""
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
    """On-policy distillation: the teacher's log-probabilities are the only signal, and rewards are not
    used."""

    name: Literal["reverse_kl"] = "reverse_kl"
    anchor: Anchor = "rollout"


class RefKl(Frozen):
    """On-policy distillation within a trust region."""

    name: Literal["ref_kl"] = "ref_kl"
    low: Above0 = TEACHER_GAP
    kappa: AtLeast0 = KAPPA
    anchor: Anchor = "rollout"


class ForwardKl(Frozen):
    """Distillation from the teacher's whole distribution, of which it tells the most probable tokens."""

    name: Literal["forward_kl"] = "forward_kl"
    top_k: TopK = TOP_K


class Kdrl(Frozen):
    """PPO, plus the distance from a teacher."""

    name: Literal["kdrl"] = "kdrl"
    clip_low: Share = CLIP_LOW
    clip_high: Above0 = CLIP_HIGH
    dual_clip: float | None = Field(DUAL_CLIP, gt=1)
    coefficient: Above0
    """The factor of the distance."""
    estimator: Literal["k2", "k3", "top_k"] = "k2"
    """k2, k3: as in `kl`, with the teacher in place of the reference. top_k: the distance of `forward_kl`."""
    top_k: TopK = TOP_K
    """For `top_k`."""
    anchor: Anchor = "prox"


class CrossEntropy(Frozen):
    """Supervised learning of what was sampled. Rewards only choose the sessions."""

    name: Literal["cross_entropy"] = "cross_entropy"
    min_reward: float | None = None
    """Sessions with a smaller reward are not trained; None trains all."""


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
    | RefKl
    | ForwardKl
    | Kdrl
    | CrossEntropy,
    Field(discriminator="name"),
    BeforeValidator(by_name),
]


class LossSettings(Frozen):
    """All settings between log-probabilities and the loss."""

    loss: Loss = Ppo()
    correction: Correction = TisToken()
    masks: tuple[Mask, ...] = (Outlier(),)
    """Masks leave rows or tokens out of the loss. Masks of rows apply before masks of tokens."""
    kl: Kl = Kl()
    entropy_bonus: AtLeast0 = 0.0
    """This factor times the entropy, in nats, is subtracted from the loss."""
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
        """Whether the `StepStatistics` of the whole step must be known before its first backward pass."""
        normalised = not isinstance(self.correction, NoCorrection) and self.correction.normalise
        return (
            normalised or isinstance(self.loss, KlCov) or any(isinstance(mask, M2po) for mask in self.masks)
        )

    @property
    def needs_reference(self) -> bool:
        return self.kl.coefficient > 0

    @property
    def needs_teacher(self) -> bool:
        return isinstance(self.loss, ReverseKl | RefKl | ForwardKl | Kdrl)

    @property
    def teacher_top_k(self) -> int:
        """How many of its most probable tokens the teacher must tell at each place."""
        if isinstance(self.loss, Kdrl) and self.loss.estimator != "top_k":
            return 0
        return self.loss.top_k if isinstance(self.loss, ForwardKl | Kdrl) else 0

    @property
    def uses_advantages(self) -> bool:
        """Whether the loss of a token depends on its advantage."""
        return not isinstance(self.loss, ReverseKl | RefKl | ForwardKl | CrossEntropy)

    @property
    def needs_anchor(self) -> bool:
        """Whether the loss depends on `lp_prox_T`; otherwise it only enters metrics."""
        corrected = not isinstance(self.correction, NoCorrection)
        anchored = getattr(self.loss, "anchor", None) == "prox"
        return (
            corrected
            or anchored
            or bool(self.masks)
            or (self.kl.estimator == "unbiased" and self.needs_reference)
        )


def corrects_twice(loss: Loss, correction: Correction) -> bool:
    """Whether loss and correction would both correct the mismatch between trainer and engine."""
    weighed = getattr(loss, "anchor", None) == "rollout"
    return weighed and not isinstance(correction, NoCorrection)
