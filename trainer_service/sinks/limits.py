"""The limits that the guards set for metrics, as curves show them."""

import msgspec

from trainer_service.settings import GuardSettings


class MetricLimit(msgspec.Struct, frozen=True):
    """What a guard allows for one metric. `most` and `least` are null if the limit is no fixed number."""

    metric: str
    guard: str
    """The setting of `trainer.guards` that sets the limit."""
    says: str
    most: float | None = None
    least: float | None = None


def limits_of(guards: GuardSettings) -> list[MetricLimit]:
    """The limits of the guards that are on."""
    limits = []
    if (most := guards.max_abs_logp) is not None:
        limits.append(MetricLimit("mismatch/abs_logp_current", "max_abs_logp", f"at most {most:g}", most))
    if (most := guards.max_kl) is not None:
        limits.append(
            MetricLimit("mismatch/kl_current", "max_kl", f"between {-most:g} and {most:g}", most, -most)
        )
    if (ratio := guards.max_grad_norm_ratio) is not None:
        says = f"at most {ratio:g} times its median over the last 100 steps, where less than 1 counts as 1"
        limits.append(MetricLimit("grad_norm", "max_grad_norm_ratio", says))
    if (drop := guards.reward_drop) is not None:
        groups = f"{guards.reward_groups} groups of a task"
        says = f"the mean over {groups} may not fall by {drop:.0%} of the best such mean"
        limits.append(MetricLimit("reward_mean", "reward_drop", says))
    return limits
