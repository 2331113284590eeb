"""The losses of the named recipes (spec §8): their way from log-probabilities to a loss."""

from collections.abc import Mapping

from trainer_service.algorithms.correction_settings import (
    Geometric,
    Icepop,
    NoCorrection,
)
from trainer_service.algorithms.loss_settings import (
    KAPPA,
    Aggregation,
    Cispo,
    Dppo,
    Gspo,
    Kl,
    LossSettings,
    Ppo,
    RefKl,
)

SYMMETRIC = Ppo(clip_high=0.2, dual_clip=None)

LOSS_PRESETS: Mapping[str, LossSettings] = {
    "default": LossSettings(),
    "async_dppo": LossSettings(loss=Dppo(kappa=KAPPA), correction=NoCorrection(), masks=()),
    "grpo_classic": LossSettings(
        loss=SYMMETRIC,
        correction=NoCorrection(),
        masks=(),
        kl=Kl(estimator="k3", coefficient=1e-3),
        aggregation=Aggregation(mode="seq_mean_token_mean"),
    ),
    "dapo": LossSettings(loss=Ppo(dual_clip=None), masks=()),
    "scale_cispo": LossSettings(
        loss=Cispo(anchor="rollout"),
        correction=NoCorrection(),
        masks=(),
        aggregation=Aggregation(mode="prompt_mean"),
    ),
    "gspo_moe": LossSettings(
        loss=Gspo(),
        correction=NoCorrection(),
        masks=(Geometric(),),
        aggregation=Aggregation(mode="seq_mean_token_mean"),
    ),
    "areal": LossSettings(loss=SYMMETRIC, correction=Icepop(low=0.0, high=5.0), masks=()),
    "opd": LossSettings(loss=RefKl(), correction=NoCorrection(), masks=()),
}
"""`areal` guesses its anchor (`prox.loglinear`), and `async_dppo`, `scale_cispo` and `opd` need none."""
