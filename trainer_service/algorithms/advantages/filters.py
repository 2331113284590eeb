"""Which groups teach nothing, and why: their rollouts end untrained, and others take their place.

They are still logged: what was easy and what was alone is part of how well the policy does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from trainer_service.algorithms.advantages.rollouts import Groups, Rollouts
from trainer_service.algorithms.advantages.settings import ZERO_VARIANCE


@dataclass(frozen=True)
class Silence:
    """Why a group teaches nothing: its name in the metrics, and the sentence of its members' verdict."""

    kind: Literal["singleton", "zero_var"]
    detail: str


def silences(
    rollouts: Rollouts, *, tolerance: float = ZERO_VARIANCE, parts: Sequence[str] = ()
) -> Mapping[str, Silence]:
    """The groups, by id, that have one rollout, or whose rewards span no more than `tolerance`
    (`filter.zero_variance_groups`); for estimators that compare members.

    With `parts`, which are compared one by one, a group is silent only where none of them varies.
    """
    if not rollouts.members:
        return {}
    groups = Groups(rollouts.groups)
    compared_BK = rollouts.parts(parts) if parts else rollouts.rewards[:, None]
    span_B = torch.stack([groups.spread(part_B) for part_B in compared_BK.unbind(1)]).amax(0)
    found: dict[str, Silence] = {}
    for member, size, span in zip(rollouts.members, groups.size_B.tolist(), span_B.tolist(), strict=True):
        if size < 2:
            found[member.group_id] = Silence("singleton", "singleton group")
        elif span <= tolerance and member.group_id not in found:
            detail = f"all {size:.0f} rewards of the group are {member.reward:g}"
            found[member.group_id] = Silence("zero_var", detail)
    return found
