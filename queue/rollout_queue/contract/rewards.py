"""The sum of rewards, and its bound, which holds in whatever order they are added."""

from collections.abc import Iterable

from rollout_queue.contract.errors import MOST_REWARDS, RewardsTooLarge, TooManyRewards
from rollout_queue.contract.records import Reward

LARGEST_REWARD = 1e9
"""The magnitudes of a session's rewards may add up to this. Far larger rewards make gradients overflow; a
restarted trainer would read them again and fail again."""
LARGEST_FLOAT = 1.7e308


def total(rewards: Iterable[Reward]) -> float | None:
    """The sum of the rewards; None if there is none.

    Rewards that older builds stored may have an infinite sum. JSON has no infinity, so the result is at most
    LARGEST_FLOAT in magnitude.
    """
    values = [reward.value for reward in rewards]
    return max(-LARGEST_FLOAT, min(LARGEST_FLOAT, sum(values))) if values else None


def check_rewards(rewards: Iterable[Reward]) -> None:
    """Raises TooManyRewards for more than a session may have, and RewardsTooLarge if their magnitudes add up
    to more than LARGEST_REWARD."""
    rewards = list(rewards)
    if len(rewards) > MOST_REWARDS:
        raise TooManyRewards(rewards[0].session_id)
    if rewards and sum(abs(reward.value) for reward in rewards) > LARGEST_REWARD:
        raise RewardsTooLarge(rewards[0].session_id)
