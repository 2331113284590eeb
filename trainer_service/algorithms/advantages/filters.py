"""Finds groups without a learning signal, and says why they have none. Their rollouts are not trained.

Their rewards are still logged. Otherwise the logged mean would leave out tasks that the policy always solves.

`filter.zero_variance_groups` is a case of `algorithms_golden.json` in the tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from trainer_service.algorithms.advantages.rollouts import Groups, Rollouts
from trainer_service.algorithms.advantages.settings import ZERO_VARIANCE


@dataclass(frozen=True)
class NoSignal:
    """Why a group has no learning signal: its name in the metrics, and the text of its members' verdict."""

    kind: Literal["singleton", "zero_var"]
    detail: str


def groups_without_signal(
    rollouts: Rollouts, *, tolerance: float = ZERO_VARIANCE, parts: Sequence[str] = ()
) -> Mapping[str, NoSignal]:
    """The groups, by id, that have a single rollout, or whose largest and smallest reward differ by at most
    `tolerance` (`filter.zero_variance_groups`). Only estimators that compare the members of a group need this
    filter.

    If `parts` of the reward are named, each part is compared by itself, in place of the whole reward. A group
    then has no signal if no part differs by more than `tolerance`.
    """
    if not rollouts.members:
        return {}
    groups = Groups(rollouts.groups)
    compared_BK = rollouts.parts(parts) if parts else rollouts.rewards[:, None]
    span_B = torch.stack([groups.spread(part_B) for part_B in compared_BK.unbind(1)]).amax(0)
    found: dict[str, NoSignal] = {}
    for member, size, span in zip(rollouts.members, groups.size_B.tolist(), span_B.tolist(), strict=True):
        if size < 2:
            found[member.group_id] = NoSignal("singleton", "singleton group")
        elif span <= tolerance and member.group_id not in found:
            detail = f"all {size:.0f} rewards of the group are {member.reward:g}"
            found[member.group_id] = NoSignal("zero_var", detail)
    return found
