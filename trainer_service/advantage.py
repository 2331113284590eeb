"""From the rewards of a group to one advantage per rollout. Statistics are over rollouts, never rows."""

from collections.abc import Sequence


def drgrpo(rewards_G: Sequence[float]) -> list[float]:
    """Reward minus the group's mean, nothing else; a group of one gets 0 (Dr. GRPO, `adv.drgrpo`)."""
    if len(rewards_G) < 2:
        return [0.0] * len(rewards_G)
    mean = sum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def silence(rewards_G: Sequence[float], zero_variance: float) -> str | None:
    """Why a group teaches nothing, in words; None when it does (`filter.zero_variance_groups`)."""
    if not rewards_G:
        return "none of its rollouts can be trained"
    if len(rewards_G) < 2:
        return "singleton group"
    if max(rewards_G) - min(rewards_G) <= zero_variance:
        return f"all {len(rewards_G)} rewards of the group are {rewards_G[0]:g}"
    return None
