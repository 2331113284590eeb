"""The sum of rewards, and the bound that keeps it finite in whatever order it is computed."""

from collections.abc import Iterable

from rollout_queue.contract.errors import MOST_REWARDS, RewardsTooLarge, TooManyRewards
from rollout_queue.contract.records import Reward

LARGEST_SUM = 1.7e308
"""The magnitudes of a session's rewards may add up to this, which is just below the largest float. So the sum
of any of them is finite, in any order."""


def total(rewards: Iterable[Reward]) -> float | None:
    """The sum of the rewards; None if there is none.

    Rewards that older builds stored may have an infinite sum. JSON has no infinity, so the result is at most
    LARGEST_SUM in magnitude.
    """
    values = [reward.value for reward in rewards]
    return max(-LARGEST_SUM, min(LARGEST_SUM, sum(values))) if values else None


def check_rewards(rewards: Iterable[Reward]) -> None:
    """Raises TooManyRewards for more than a session may have, and RewardsTooLarge if their magnitudes add up
    to more than LARGEST_SUM."""
    rewards = list(rewards)
    if len(rewards) > MOST_REWARDS:
        raise TooManyRewards(rewards[0].session_id)
    if rewards and sum(abs(reward.value) for reward in rewards) > LARGEST_SUM:
        raise RewardsTooLarge(rewards[0].session_id)
