"""Computes the advantages of rows from the rewards of their groups.

one group:      Member ─ rollout_of ─▶ Rollout ─ compare ─▶ Comparison
a whole step:   rows and rollouts ─ with_advantages ─▶ rows with their advantages
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from trainer_service.algorithms.advantages.advantages import ADVANTAGES, baselines_after, to_tokens
from trainer_service.algorithms.advantages.filters import NoSignal, groups_without_signal
from trainer_service.algorithms.advantages.rollouts import RefusedRollout, Rollout, Rollouts
from trainer_service.algorithms.advantages.shaping import shaped, untruncated
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.episode import Member
from trainer_service.rows.rows import Row

Baselines = Mapping[str, float]
"""The running mean reward of each agent. The estimator `rae` compares rewards with this baseline."""


@dataclass(frozen=True)
class Comparison:
    """The rollouts of one group after shaping, and which of them have an advantage."""

    rollouts: tuple[Rollout, ...]
    refused: Mapping[str, str]
    """Why a rollout cannot be compared, by rollout id."""
    silence: NoSignal | None
    """Why no rollout of the group has an advantage; None if one has."""
    live: frozenset[str]
    """Ids of the rollouts that have an advantage if the group is scored alone."""


def rollout_of(member: Member, group_id: str, trainable: Collection[str]) -> Rollout:
    """The values of a member that the formulas need. `trainable` has the ids of the turns whose outputs are
    trained; `group_id` must be unique among all groups. Raises RefusedRollout if a reward is not finite."""
    parts: dict[str, float] = {}
    for reward in member.rewards:
        source = reward.source or ""
        parts[source] = parts.get(source, 0.0) + reward.value
    return Rollout(
        rollout_id=member.session_id,
        group_id=group_id,
        reward=member.reward if member.reward is not None else float("nan"),
        output_tokens=sum(len(turn.output_ids) for turn in member.turns if turn.turn_id in trainable),
        input_tokens=sum(len(turn.context_ids) for turn in member.turns),
        turns=len(member.turns),
        truncated=member.truncated,
        agent=next((turn.lineage for turn in member.turns if turn.lineage), ""),
        parts=parts,
    )


def compare(rollouts: Sequence[Rollout], algorithm: AlgorithmSettings) -> Comparison:
    """Shape the rewards of one group, and find which of its rollouts have an advantage. A rollout that a
    formula refuses is left out, and the others are compared without it."""
    refused: dict[str, str] = {}
    while True:
        able = [each for each in rollouts if each.rollout_id not in refused]
        try:
            return _compare(able, refused, algorithm)
        except RefusedRollout as error:
            refused[error.rollout_id] = error.reason


def with_advantages(
    rows: Sequence[Row], rollouts: Sequence[Rollout], algorithm: AlgorithmSettings, baselines: Baselines
) -> list[Row]:
    """The rows of a whole step, each with the advantage of its rollout. Rows stay unchanged if advantages are
    computed later for each token, or if the loss uses none."""
    if not rows or algorithm.credits_tokens or not algorithm.uses_advantages:
        return list(rows)
    estimator = ADVANTAGES[algorithm.advantage.name]
    advantages_B = estimator.score(Rollouts(tuple(rollouts), baselines), algorithm.advantage)
    place = {each.rollout_id: index for index, each in enumerate(rollouts)}
    rollout_R = torch.tensor([place[row.session_id] for row in rows])
    tokens_R = torch.tensor([row.trained_tokens for row in rows])
    rows_T = torch.repeat_interleave(torch.arange(len(rows)), tokens_R)
    bound = algorithm.advantage_bound
    advantages_T = to_tokens(advantages_B, algorithm.advantage, rollout_R, rows_T, bound=bound)
    first_R = tokens_R.cumsum(0) - tokens_R
    advantages = advantages_T[first_R].tolist()
    return [replace(row, advantage=advantage) for row, advantage in zip(rows, advantages, strict=True)]


def updated_baselines(
    rollouts: Sequence[Rollout], algorithm: AlgorithmSettings, baselines: Baselines
) -> dict[str, float]:
    """The baselines after a step that trains these rollouts."""
    if algorithm.advantage.name != "rae":
        return dict(baselines)
    return baselines_after(Rollouts(tuple(rollouts), baselines), algorithm.advantage)


def _compare(
    rollouts: Sequence[Rollout], refused: Mapping[str, str], algorithm: AlgorithmSettings
) -> Comparison:
    kept, _ = untruncated(rollouts, algorithm.shaping.truncated)
    members = shaped(kept, algorithm.shaping)
    every = frozenset(each.rollout_id for each in members)
    if not algorithm.compares:
        return Comparison(members, refused, None, every)
    batch = Rollouts(members)
    parts = list(algorithm.advantage.weights) if algorithm.advantage.name == "gdpo" else []
    found = groups_without_signal(batch, tolerance=algorithm.zero_variance, parts=parts)
    if found:
        return Comparison(members, refused, next(iter(found.values())), frozenset())
    advantages = ADVANTAGES[algorithm.advantage.name].score(batch, algorithm.advantage).tolist()
    live = frozenset(each.rollout_id for each, value in zip(members, advantages, strict=True) if value != 0)
    silence = None if live else NoSignal("zero_var", "no rollout of the group has an advantage")
    return Comparison(members, refused, silence, live)
