"""Decides which members of a complete group are trained, and why others are not, such as too old ones.

Group ─ screen ─▶ ScreenedGroup: plans of rows, and a verdict for every member that is not trained
one group:      Member ─ rollout_of ─▶ Rollout ─ compare ─▶ Comparison
a whole step:   rows and rollouts ─ with_advantages ─▶ rows with their advantages
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rollout_queue.contract.records import Verdict
from trainer_service.algorithms.advantages import Rae
from trainer_service.algorithms.returns import TokenAdvantage
from trainer_service.algorithms.rollouts import (
    NoSignal,
    RefusedRollout,
    Rollout,
    Rollouts,
    groups_without_signal,
    shaped,
    untruncated,
)
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.assemble import Group, Member
from trainer_service.groups.guards import Recovery
from trainer_service.rows.rows import PlannedRow, Row, exclusions, planned_rows

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
    estimator = algorithm.advantage
    if not rows or isinstance(estimator, TokenAdvantage) or not algorithm.loss.uses_advantages:
        return list(rows)
    advantages_B = estimator.score(Rollouts(tuple(rollouts), baselines))
    place = {each.rollout_id: index for index, each in enumerate(rollouts)}
    rollout_R = torch.tensor([place[row.session_id] for row in rows])
    tokens_R = torch.tensor([row.trained_tokens for row in rows])
    rows_T = torch.repeat_interleave(torch.arange(len(rows)), tokens_R)
    bound = algorithm.advantage_bound
    advantages_T = estimator.to_tokens(advantages_B, rollout_R, rows_T, bound=bound)
    first_R = tokens_R.cumsum(0) - tokens_R
    advantages = advantages_T[first_R].tolist()
    return [replace(row, advantage=advantage) for row, advantage in zip(rows, advantages, strict=True)]


def updated_baselines(
    rollouts: Sequence[Rollout], algorithm: AlgorithmSettings, baselines: Baselines
) -> dict[str, float]:
    """The baselines after a step that trains these rollouts."""
    if not isinstance(algorithm.advantage, Rae):
        return dict(baselines)
    return algorithm.advantage.baselines_after(Rollouts(tuple(rollouts), baselines))


def _compare(
    rollouts: Sequence[Rollout], refused: Mapping[str, str], algorithm: AlgorithmSettings
) -> Comparison:
    kept, _ = untruncated(rollouts, algorithm.shaping.truncated)
    members = shaped(kept, algorithm.shaping)
    every = frozenset(each.rollout_id for each in members)
    estimator = algorithm.advantage
    if isinstance(estimator, TokenAdvantage) or not algorithm.compares:
        return Comparison(members, refused, None, every)
    batch = Rollouts(members)
    found = groups_without_signal(batch, tolerance=algorithm.zero_variance, parts=estimator.parts)
    if found:
        return Comparison(members, refused, next(iter(found.values())), frozenset())
    advantages = estimator.score(batch).tolist()
    live = frozenset(each.rollout_id for each, value in zip(members, advantages, strict=True) if value != 0)
    silence = None if live else NoSignal("zero_var", "no rollout of the group has an advantage")
    return Comparison(members, refused, silence, live)


@dataclass(frozen=True)
class ScreenedGroup:
    """A complete group: the rows that are trained, and the verdicts of the members that are not."""

    group: Group
    planned: tuple[PlannedRow, ...]
    """The rows of the rollouts that are trained, without their tokens: a group that waits for more groups is
    screened again with every poll."""
    rollouts: tuple[Rollout, ...]
    """The rollouts that are trained, with their shaped rewards."""
    live_rows: int
    """How many rows have an advantage if the group is scored alone."""
    untrained: tuple[tuple[Member, Verdict | None], ...]
    """The members that are not trained. The verdict is None if the gateway has given one already."""
    skip_reason: str | None
    """Why no member is trained; None if the group has rows."""

    @property
    def rows(self) -> list[Row]:
        """Makes the rows. Their advantages are computed later, over the whole step."""
        return [planned.row() for planned in self.planned]


def screen(
    group: Group, version: int, algorithm: AlgorithmSettings, undone: Sequence[Recovery] = ()
) -> ScreenedGroup:
    """Decide for every member whether it is trained by a step that starts from `version`. What versions
    sampled that are `undone` is not trained."""
    untrained: list[tuple[Member, Verdict | None]] = []
    able: dict[str, Member] = {}
    name = group.name
    for member in group.members:
        if not member.rewarded:
            untrained.append((member, member.verdict))
            continue
        if verdict := _refusal(member, version, algorithm) or _undone(member, undone):
            untrained.append((member, verdict))
        else:
            able[member.session_id] = member
    found = compare([rollout_of(member, name, member.trainable) for member in able.values()], algorithm)
    for session_id, reason in found.refused.items():
        untrained.append((able.pop(session_id), Verdict(code="invalid", detail=reason)))
    skip_reason = found.silence.detail if found.silence else None
    if not found.rollouts:
        skip_reason = "none of its rollouts can be trained"
    if skip_reason is not None:
        verdict = Verdict(code="zero_advantage", detail=skip_reason)
        untrained += [(member, verdict) for member in able.values()]
        able = {}
    shaped = {rollout.rollout_id: rollout.reward for rollout in found.rollouts}
    planned = tuple(
        row
        for session_id, member in able.items()
        for row in planned_rows(
            session_id, member.turns, member.trainable, _credit(member, shaped[session_id]), name
        )
    )
    return ScreenedGroup(
        group=group,
        planned=planned,
        rollouts=found.rollouts if able else (),
        live_rows=sum(row.session_id in found.live for row in planned),
        untrained=tuple(untrained),
        skip_reason=skip_reason,
    )


def is_too_old(group: Group, version: int, algorithm: AlgorithmSettings) -> bool:
    """Whether all of its rollouts are older than allowed."""
    spans = [member.sampled_by for member in group.rollouts if member.sampled_by is not None]
    youngest = max((algorithm.deciding(*span) for span in spans), default=version)
    return youngest < algorithm.oldest_allowed(version)


def skipped_for_newer(group: Group, version: int, reason: str) -> ScreenedGroup:
    """The end of a group that no step takes, because steps take newer ones."""
    untrained = [
        (
            m,
            Verdict(code="skipped_for_newer", detail=f"{reason}: {_age(m, version)}")
            if m.rewarded
            else m.verdict,
        )
        for m in group.members
    ]
    return ScreenedGroup(group, (), (), 0, tuple(untrained), reason)


def with_verdict(screened: ScreenedGroup, verdict: Verdict) -> ScreenedGroup:
    """The same group without rows: every member that would have been trained gets `verdict`."""
    untrained = {member.session_id for member, _ in screened.untrained}
    others = tuple((m, verdict) for m in screened.group.members if m.session_id not in untrained)
    return replace(
        screened,
        planned=(),
        rollouts=(),
        live_rows=0,
        untrained=screened.untrained + others,
        skip_reason=verdict.detail,
    )


def without_sessions(screened: ScreenedGroup, reasons: Mapping[str, str], by: str) -> ScreenedGroup:
    """The same group without the sessions that `by` refuses. `reasons` has the refused ids, and why each was
    refused. These sessions end as invalid."""
    leaving = [member for member in screened.group.members if member.session_id in reasons]
    planned = tuple(row for row in screened.planned if row.session_id not in reasons)
    ended = ((m, Verdict(code="invalid", detail=f"{by}: {reasons[m.session_id]}")) for m in leaving)
    return replace(
        screened,
        planned=planned,
        rollouts=tuple(each for each in screened.rollouts if each.rollout_id not in reasons),
        live_rows=min(screened.live_rows, len(planned)),
        untrained=screened.untrained + tuple(ended),
        skip_reason=screened.skip_reason if planned else f"{by} refuses all of its rollouts",
    )


def _refusal(member: Member, version: int, algorithm: AlgorithmSettings) -> Verdict | None:
    """Why a rewarded member cannot be trained: it has no trainable turn, too long a row, a small reward or
    old tokens."""
    if member.sampled_by is None:
        codes = {verdict.code for verdict in exclusions(member.turns).values()}
        code = codes.pop() if len(codes) == 1 else "not_for_training"
        return Verdict(code=code, detail="no turn of the session can be trained")
    most = algorithm.max_row_tokens
    if most is not None and member.longest_row > most:
        return Verdict(
            code="too_long", detail=f"a row has {member.longest_row} tokens, at most {most} are trained"
        )
    least = getattr(algorithm.loss, "min_reward", None)
    if least is not None and member.reward is not None and member.reward < least:
        return Verdict(
            code="zero_advantage", detail=f"its reward {member.reward:g} is below loss.min_reward, {least:g}"
        )
    judged_by = algorithm.deciding(*member.sampled_by)
    if algorithm.stale != "correct" and judged_by < algorithm.oldest_allowed(version):
        return Verdict(code="stale", detail=_age(member, version))
    return None


def _undone(member: Member, undone: Sequence[Recovery]) -> Verdict | None:
    """Why a member that was sampled by a version that is undone cannot be trained."""
    oldest, newest = member.sampled_by or (0, -1)
    for recovery in undone:
        if recovery.undid(oldest, newest):
            detail = f"sampled by version {newest}, and the training went back to version {recovery.restored}"
            return Verdict(code="stale", detail=detail)
    return None


def _age(member: Member, version: int) -> str:
    oldest, _ = member.sampled_by or (version, version)
    return f"sampled by version {oldest}, {version - oldest} before the trainer's {version}"


def _credit(member: Member, reward: float) -> dict[str | None, float]:
    """The sum of the rewards that name a turn, by turn id. The key None has the sum of the rest: rewards of
    the whole session, rewards of turns that are not trained, and the difference that shaping makes; `reward`
    is the one after it."""
    if member.truncated and reward == 0:  # shaping took the session's reward, so no turn keeps its own
        return {}
    assert member.reward is not None  # noqa: S101 - the member is rewarded
    credit: dict[str | None, float] = {None: reward - member.reward}
    for each in member.rewards:
        turn_id = each.turn_id if each.turn_id in member.trainable else None
        credit[turn_id] = credit.get(turn_id, 0.0) + each.value
    return credit
