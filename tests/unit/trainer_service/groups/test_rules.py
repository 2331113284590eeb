"""How many members of a group are enough, and when its mean reward has fallen."""

import pytest

from trainer_service.groups.episode import Rules
from trainer_service.groups.guards import reward
from trainer_service.settings import GuardSettings


@pytest.mark.parametrize(
    ("share", "size", "needed"),
    [(0.0, 8, 8), (0.5, 8, 4), (0.3, 8, 6), (0.29, 100, 71), (0.9, 8, 2), (0.9, 1, 1), (0.1, 4, 4)],
)
def test_over_sampling_ends_a_group_early_but_not_below_its_smallest_size(
    share: float, size: int, needed: int
) -> None:
    """0.29 · 100 is 28.999… in floating point."""
    rules = Rules(vocab_size=10, train_truncated=False, group_wait_s=1.0, over_sampling=share)
    assert rules.needed(size) == needed


def test_the_best_groups_and_the_last_groups_have_none_in_common() -> None:
    settings = GuardSettings(reward_groups=50)
    rewards = [0.0] * 5 + [8.0] * 45 + [8.0] * 5 + [0.0] * 45
    assert "of the last 50 groups is 0.8, and was 7.2 at best" in str(reward(rewards, settings))
