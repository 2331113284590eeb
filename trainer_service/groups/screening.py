"""Decides which members of a complete group are trained, and why the others are not.

Group ─ screen ─▶ ScreenedGroup: plans of rows, and a verdict for every member that is not trained
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rollout_queue.contract.records import Verdict
from trainer_service.algorithms.advantages.rollouts import Rollout
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.assemble import Group, Member
from trainer_service.groups.comparison import compare, rollout_of
from trainer_service.groups.undone import Recovery
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
        row for session_id, member in able.items() for row in _rows(member, name, shaped[session_id])
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
    judged_by = max(spans, default=(version, version))[0]
    if algorithm.stale == "mask":
        judged_by = max((newest for _, newest in spans), default=version)
    return version - judged_by > algorithm.max_staleness


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
    oldest, newest = member.sampled_by
    judged_by = {"correct": version, "mask": newest}.get(algorithm.stale, oldest)
    if version - judged_by > algorithm.max_staleness:
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


def _rows(member: Member, group_id: str, reward: float) -> tuple[PlannedRow, ...]:
    """The rows of a member. `reward` is its reward after shaping."""
    credit = _credit(member, reward)
    return planned_rows(member.session_id, member.turns, member.trainable, credit, group_id)


def _credit(member: Member, reward: float) -> dict[str | None, float]:
    """The sum of the rewards that name a turn, by turn id. The key None has the sum of the rest: rewards of
    the whole session, rewards of turns that are not trained, and the difference that shaping makes."""
    if member.truncated and reward == 0:  # shaping took the session's reward, so no turn keeps its own
        return {}
    assert member.reward is not None  # noqa: S101 - the member is rewarded
    credit: dict[str | None, float] = {None: reward - member.reward}
    for each in member.rewards:
        turn_id = each.turn_id if each.turn_id in member.trainable else None
        credit[turn_id] = credit.get(turn_id, 0.0) + each.value
    return credit
