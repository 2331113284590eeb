"""Decides which members of a complete group are trained, and why the others are not.

Group ─ screen ─▶ ScreenedGroup: plans of rows, and a verdict for every member that is not trained
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollout_queue.contract.records import Verdict
from trainer_service.algorithms.advantages.rollouts import Rollout
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.assemble import Group, Member
from trainer_service.groups.comparison import compare, rollout_of
from trainer_service.rows.rows import PlannedRow, Row, planned_rows
from trainer_service.rows.turns import exclusions


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


def screen(group: Group, version: int, algorithm: AlgorithmSettings) -> ScreenedGroup:
    """Decide for every member whether it is trained by a step that starts from `version`."""
    untrained: list[tuple[Member, Verdict | None]] = []
    able: dict[str, Member] = {}
    trainable: dict[str, frozenset[str]] = {}
    # The group's own id is not unique: a session without a group makes a group under its own id, which may
    # also be the id of a real group. A session is in one group only, so its id is unique here.
    name = group.members[0].session_id
    for member in group.members:
        if not member.rewarded:
            untrained.append((member, member.verdict))
            continue
        turn_ids = trainable[member.session_id] = _trainable(member)
        if verdict := _refusal(member, turn_ids, version, algorithm):
            untrained.append((member, verdict))
        else:
            able[member.session_id] = member
    found = compare(
        [rollout_of(member, name, trainable[session_id]) for session_id, member in able.items()], algorithm
    )
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
        for row in _rows(member, trainable[session_id], name, shaped[session_id])
    )
    return ScreenedGroup(
        group=group,
        planned=planned,
        rollouts=found.rollouts if able else (),
        live_rows=sum(row.session_id in found.live for row in planned),
        untrained=tuple(untrained),
        skip_reason=skip_reason,
    )


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


def without_sessions(screened: ScreenedGroup, reasons: Mapping[str, str]) -> ScreenedGroup:
    """The same group without the sessions that a teacher refuses. `reasons` has the refused ids, and why
    each was refused. These sessions end as invalid."""
    leaving = [member for member in screened.group.members if member.session_id in reasons]
    planned = tuple(row for row in screened.planned if row.session_id not in reasons)
    ended = ((m, Verdict(code="invalid", detail=f"the teacher: {reasons[m.session_id]}")) for m in leaving)
    return replace(
        screened,
        planned=planned,
        rollouts=tuple(each for each in screened.rollouts if each.rollout_id not in reasons),
        live_rows=min(screened.live_rows, len(planned)),
        untrained=screened.untrained + tuple(ended),
        skip_reason=screened.skip_reason if planned else "the teacher refuses all of its rollouts",
    )


def _trainable(member: Member) -> frozenset[str]:
    """Ids of the turns that may be trained."""
    excluded = exclusions(member.turns)
    return frozenset(t.turn_id for t in member.turns if t.output_ids and t.turn_id not in excluded)


def _refusal(
    member: Member, trainable: frozenset[str], version: int, algorithm: AlgorithmSettings
) -> Verdict | None:
    """Why a rewarded member cannot be trained: it has no trainable turn, or its tokens are too old."""
    if not trainable:
        codes = {verdict.code for verdict in exclusions(member.turns).values()}
        code = codes.pop() if len(codes) == 1 else "not_for_training"
        return Verdict(code=code, detail="no turn of the session can be trained")
    sampled_by = [s.version for t in member.turns if t.turn_id in trainable for s in t.versions]
    oldest, youngest = min(sampled_by), max(sampled_by)
    judged_by = {"correct": version, "mask": youngest}.get(algorithm.stale, oldest)
    if version - judged_by > algorithm.max_staleness:
        detail = f"sampled by version {oldest}, {version - oldest} before the trainer's {version}"
        return Verdict(code="stale", detail=detail)
    return None


def _rows(member: Member, trainable: frozenset[str], group_id: str, reward: float) -> tuple[PlannedRow, ...]:
    """The rows of a member. `reward` is its reward after shaping."""
    credit = _credit(member, trainable, reward)
    return planned_rows(member.session_id, member.turns, trainable, credit, group_id)


def _credit(member: Member, trainable: frozenset[str], reward: float) -> dict[str | None, float]:
    """The sum of the rewards that name a turn, by turn id. The key None has the sum of the rest: rewards of
    the whole session, rewards of turns that are not trained, and the difference that shaping makes."""
    if member.truncated and reward == 0:  # shaping took the session's reward, so no turn keeps its own
        return {}
    assert member.reward is not None  # noqa: S101 - the member is rewarded
    credit: dict[str | None, float] = {None: reward - member.reward}
    for each in member.rewards:
        turn_id = each.turn_id if each.turn_id in trainable else None
        credit[turn_id] = credit.get(turn_id, 0.0) + each.value
    return credit
