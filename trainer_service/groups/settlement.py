"""What becomes of a group: which entries it frees, and the verdict of each session and turn.

Group ─ judge ─▶ ScreenedGroup ── silent ──▶ Acknowledgement (stale, zero_advantage, …)   acknowledged at once
                       └─ live ────▶ rows ─▶ step ─▶ Acknowledgement (trained)     …after the checkpoint
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from rollout_queue.contract.records import Turn, Verdict
from rollout_queue.contract.stream import Verdicts
from trainer_service.algorithms.advantages.rollouts import Rollout
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.assemble import Group, Member
from trainer_service.groups.comparison import compared, rollout_of
from trainer_service.rows.rows import Row, rows_of
from trainer_service.rows.turns import exclusions


class AcknowledgedTurn(msgspec.Struct, frozen=True):
    session_id: str
    turn_id: str
    verdict: Verdict


class Acknowledgement(msgspec.Struct, frozen=True):
    """Entries that nothing needs any more, and what became of what they told. Survives in a checkpoint."""

    entry_ids: list[str]
    sessions: dict[str, Verdict]
    turns: list[AcknowledgedTurn]

    @property
    def verdicts(self) -> Verdicts:
        by_turn = {(turn.session_id, turn.turn_id): turn.verdict for turn in self.turns}
        return Verdicts(self.sessions, by_turn)

    @classmethod
    def joined(cls, parts: Iterable["Acknowledgement"]) -> "Acknowledgement":
        entry_ids: list[str] = []
        sessions: dict[str, Verdict] = {}
        turns: list[AcknowledgedTurn] = []
        for part in parts:
            entry_ids += part.entry_ids
            sessions |= part.sessions
            turns += part.turns
        return cls(entry_ids, sessions, turns)


@dataclass(frozen=True)
class ScreenedGroup:
    """A complete group, the rows that it trains, and the verdicts of the members that it does not."""

    group: Group
    rows: tuple[Row, ...]
    """Of the rollouts that are trained; their advantages are of the step, and not known yet."""
    rollouts: tuple[Rollout, ...]
    """Those, with the rewards that are compared."""
    live_rows: int
    """How many rows have an advantage, as far as the group alone tells."""
    rewards: tuple[float, ...]
    """Of every rewarded rollout, trained or not."""
    untrained: tuple[tuple[Member, Verdict | None], ...]
    silence: str | None
    """Why nothing of the group is trained; None when its rows are."""


def judge(group: Group, version: int, algorithm: AlgorithmSettings) -> ScreenedGroup:
    """Look at a group under the present version: who is stale, who compares with whom, what is trained."""
    untrained: list[tuple[Member, Verdict | None]] = []
    able: dict[str, Member] = {}
    trainable: dict[str, frozenset[str]] = {}
    name = group.members[0].session_id  # a session is in one group; a lone one may have the id of a group
    for member in group.members:
        if not member.rewarded:
            untrained.append((member, member.verdict))
            continue
        turn_ids = trainable[member.session_id] = _trainable(member)
        if verdict := _refusal(member, turn_ids, version, algorithm):
            untrained.append((member, verdict))
        else:
            able[member.session_id] = member
    found = compared(
        [rollout_of(member, name, trainable[session_id]) for session_id, member in able.items()], algorithm
    )
    for session_id, reason in found.refused.items():
        untrained.append((able.pop(session_id), Verdict(code="invalid", detail=reason)))
    silence = found.silence.detail if found.silence else None
    if not found.rollouts:
        silence = "none of its rollouts can be trained"
    if silence is not None:
        verdict = Verdict(code="zero_advantage", detail=silence)
        untrained += [(member, verdict) for member in able.values()]
        able = {}
    shaped = {rollout.rollout_id: rollout.reward for rollout in found.rollouts}
    rows = tuple(
        row
        for session_id, member in able.items()
        for row in _rows(member, trainable[session_id], name, shaped[session_id])
    )
    return ScreenedGroup(
        group=group,
        rows=rows,
        rollouts=found.rollouts if able else (),
        live_rows=sum(row.session_id in found.live for row in rows),
        rewards=tuple(_reward(member) for member in group.rollouts),
        untrained=tuple(untrained),
        silence=silence,
    )


def settle(judged: ScreenedGroup, step: int | None = None, version: int | None = None) -> Acknowledgement:
    """The end of every member: trained by `step` into `version`, or not trained and why."""
    trained = Verdict(code="trained", step=step, version=version)
    untrained = {member.session_id: verdict for member, verdict in judged.untrained}
    sessions: dict[str, Verdict] = {}
    turns: list[AcknowledgedTurn] = []
    for member in judged.group.members:
        verdict = untrained.get(member.session_id, trained)
        if verdict is None:  # the gateway closed that session with a verdict of its own
            continue
        sessions[member.session_id] = verdict
        own = exclusions(member.turns)
        turns += [
            AcknowledgedTurn(member.session_id, turn.turn_id, own.get(turn.turn_id) or _of(turn, verdict))
            for turn in member.turns
        ]
    entry_ids = [entry_id for member in judged.group.members for entry_id in member.entry_ids]
    return Acknowledgement(entry_ids, sessions, turns)


def refused(judged: ScreenedGroup, verdict: Verdict) -> ScreenedGroup:
    """The same group, none of which is trained: whoever would have been gets `verdict`."""
    untrained = {member.session_id for member, _ in judged.untrained}
    others = tuple((m, verdict) for m in judged.group.members if m.session_id not in untrained)
    return replace(
        judged,
        rows=(),
        rollouts=(),
        live_rows=0,
        untrained=judged.untrained + others,
        silence=verdict.detail,
    )


def without(judged: ScreenedGroup, reasons: Mapping[str, str]) -> ScreenedGroup:
    """The same group without the sessions that a teacher refuses, which end as invalid."""
    leaving = [member for member in judged.group.members if member.session_id in reasons]
    rows = tuple(row for row in judged.rows if row.session_id not in reasons)
    ended = ((m, Verdict(code="invalid", detail=f"the teacher: {reasons[m.session_id]}")) for m in leaving)
    return replace(
        judged,
        rows=rows,
        rollouts=tuple(each for each in judged.rollouts if each.rollout_id not in reasons),
        live_rows=min(judged.live_rows, len(rows)),
        untrained=judged.untrained + tuple(ended),
        silence=judged.silence if rows else "the teacher refuses all of it",
    )


def _trainable(member: Member) -> frozenset[str]:
    excluded = exclusions(member.turns)
    return frozenset(t.turn_id for t in member.turns if t.output_ids and t.turn_id not in excluded)


def _refusal(
    member: Member, trainable: frozenset[str], version: int, algorithm: AlgorithmSettings
) -> Verdict | None:
    if not trainable:
        excluded = exclusions(member.turns)
        codes = {verdict.code for verdict in excluded.values()}
        code = codes.pop() if len(codes) == 1 else "not_for_training"
        return Verdict(code=code, detail="no turn of the session can be trained")
    sampled_by = [s.version for t in member.turns if t.turn_id in trainable for s in t.versions]
    oldest, youngest = min(sampled_by), max(sampled_by)
    judged_by = {"correct": version, "mask": youngest}.get(algorithm.stale, oldest)
    if version - judged_by > algorithm.max_staleness:
        detail = f"sampled by version {oldest}, {version - oldest} before the trainer's {version}"
        return Verdict(code="stale", detail=detail)
    return None


def _of(turn: Turn, session: Verdict) -> Verdict:
    if session.code == "trained" and not turn.output_ids:
        return Verdict(code="invalid", detail="the turn has no output")
    return session


def _rows(member: Member, trainable: frozenset[str], group_id: str, reward: float) -> tuple[Row, ...]:
    """`reward` is what the session is worth once it is shaped."""
    credit = _credit(member, trainable, reward)
    return rows_of(member.session_id, member.turns, trainable, credit, group_id)


def _credit(member: Member, trainable: frozenset[str], reward: float) -> dict[str | None, float]:
    """Rewards by the turn that they name; those of the whole session, of turns that are not trained, and what
    shaping adds or takes, under None."""
    if member.truncated and reward == 0:  # made worthless, and its turns with it
        return {}
    credit: dict[str | None, float] = {None: reward - _reward(member)}
    for each in member.rewards:
        turn_id = each.turn_id if each.turn_id in trainable else None
        credit[turn_id] = credit.get(turn_id, 0.0) + each.value
    return credit


def _reward(member: Member) -> float:
    assert member.reward is not None  # noqa: S101 - `rewarded` was asked
    return member.reward


class Batch(NamedTuple):
    """Live groups, oldest first."""

    groups: list[ScreenedGroup]
    full: bool
    """Whether they make a step; else it waits for more."""


def select(judged: Iterable[ScreenedGroup], algorithm: AlgorithmSettings, flush: bool) -> Batch:
    """Of live groups, those of the next step: it is full once enough rows have an advantage, or when told to
    go with what there is.

    `max_rows` bounds the step once it has enough; a group is never split. Takes no more than one group that
    the step does not: the others are judged when their turn comes.
    """
    chosen: list[ScreenedGroup] = []
    rows = live = 0
    for group in judged:
        if live >= algorithm.min_live_rows and rows + len(group.rows) > algorithm.max_rows:
            break
        chosen.append(group)
        rows += len(group.rows)
        live += group.live_rows
    return Batch(chosen, live >= algorithm.min_live_rows or (flush and live > 0))
