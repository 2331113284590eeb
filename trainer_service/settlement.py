"""What becomes of a group: which entries it frees, and the verdict of each session and turn.

Group ─ judge ─▶ Judged ── silent ──▶ Settlement (stale, zero_advantage, …)   acknowledged at once
                       └─ live ────▶ rows ─▶ step ─▶ Settlement (trained)     …after the checkpoint
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from rollout_queue.records import Turn, Verdict
from rollout_queue.stream import Verdicts
from trainer_service.advantage import drgrpo, silence
from trainer_service.assemble import Group, Member
from trainer_service.batch import Row, rows_of
from trainer_service.settings import AlgorithmSettings
from trainer_service.turns import exclusions


class TurnVerdict(msgspec.Struct, frozen=True):
    session_id: str
    turn_id: str
    verdict: Verdict


class Settlement(msgspec.Struct, frozen=True):
    """Entries that nothing needs any more, and what became of what they told. Survives in a checkpoint."""

    entry_ids: list[str]
    sessions: dict[str, Verdict]
    turns: list[TurnVerdict]

    @property
    def verdicts(self) -> Verdicts:
        by_turn = {(turn.session_id, turn.turn_id): turn.verdict for turn in self.turns}
        return Verdicts(self.sessions, by_turn)

    @classmethod
    def joined(cls, parts: Iterable["Settlement"]) -> "Settlement":
        entry_ids: list[str] = []
        sessions: dict[str, Verdict] = {}
        turns: list[TurnVerdict] = []
        for part in parts:
            entry_ids += part.entry_ids
            sessions |= part.sessions
            turns += part.turns
        return cls(entry_ids, sessions, turns)


@dataclass(frozen=True)
class Judged:
    """A complete group, the rows that it trains, and the verdicts of the members that it does not."""

    group: Group
    rows: tuple[Row, ...]
    rewards: tuple[float, ...]
    """Of every rewarded rollout, trained or not."""
    untrained: tuple[tuple[Member, Verdict | None], ...]
    silence: str | None
    """Why nothing of the group is trained; None when its rows are."""

    @property
    def live_rows(self) -> int:
        return sum(row.advantage != 0 for row in self.rows)


def judge(group: Group, version: int, algorithm: AlgorithmSettings) -> Judged:
    """Score a group under the present version: who is stale, who compares with whom, what is trained."""
    untrained: list[tuple[Member, Verdict | None]] = []
    rollouts: list[tuple[Member, frozenset[str]]] = []
    for member in group.members:
        if not member.rewarded:
            untrained.append((member, member.verdict))
            continue
        trainable = _trainable(member)
        if verdict := _refusal(member, trainable, version, algorithm):
            untrained.append((member, verdict))
        else:
            rollouts.append((member, trainable))
    rewards = [_reward(member) for member, _ in rollouts]
    silent = silence(rewards, algorithm.zero_variance)
    rows: list[Row] = []
    if silent is None:
        for (member, trainable), advantage in zip(rollouts, drgrpo(rewards), strict=True):
            rows += rows_of(member.session_id, member.turns, trainable, advantage)
    else:
        verdict = Verdict(code="zero_advantage", detail=silent)
        untrained += [(member, verdict) for member, _ in rollouts]
    return Judged(
        group=group,
        rows=tuple(rows),
        rewards=tuple(_reward(member) for member in group.rollouts),
        untrained=tuple(untrained),
        silence=silent,
    )


def settle(judged: Judged, step: int | None = None, version: int | None = None) -> Settlement:
    """The end of every member: trained by `step` into `version`, or not trained and why."""
    trained = Verdict(code="trained", step=step, version=version)
    untrained = {member.session_id: verdict for member, verdict in judged.untrained}
    sessions: dict[str, Verdict] = {}
    turns: list[TurnVerdict] = []
    for member in judged.group.members:
        verdict = untrained.get(member.session_id, trained)
        if verdict is None:  # the gateway closed that session with a verdict of its own
            continue
        sessions[member.session_id] = verdict
        own = exclusions(member.turns)
        turns += [
            TurnVerdict(member.session_id, turn.turn_id, own.get(turn.turn_id) or _of(turn, verdict))
            for turn in member.turns
        ]
    entry_ids = [entry_id for member in judged.group.members for entry_id in member.entry_ids]
    return Settlement(entry_ids, sessions, turns)


def refused(judged: Judged, verdict: Verdict) -> Judged:
    """The same group, none of which is trained: whoever would have been gets `verdict`."""
    untrained = {member.session_id for member, _ in judged.untrained}
    others = tuple((m, verdict) for m in judged.group.members if m.session_id not in untrained)
    return replace(judged, rows=(), untrained=judged.untrained + others, silence=verdict.detail)


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
    oldest = min(span.version for t in member.turns if t.turn_id in trainable for span in t.versions)
    if version - oldest > algorithm.max_staleness:
        detail = f"sampled by version {oldest}, {version - oldest} before the trainer's {version}"
        return Verdict(code="stale", detail=detail)
    return None


def _of(turn: Turn, session: Verdict) -> Verdict:
    if session.code == "trained" and not turn.output_ids:
        return Verdict(code="invalid", detail="the turn has no output")
    return session


def _reward(member: Member) -> float:
    assert member.reward is not None  # noqa: S101 - `rewarded` was asked
    return member.reward


def select(judged: Iterable[Judged], algorithm: AlgorithmSettings, flush: bool) -> list[Judged]:
    """Of live groups, those of the next step, oldest first; none while too few rows have an advantage.

    `max_rows` bounds the step once it has enough; a group is never split. Takes no more than one group that
    the step does not: the others are judged when their turn comes.
    """
    chosen: list[Judged] = []
    rows = live = 0
    for group in judged:
        if live >= algorithm.min_live_rows and rows + len(group.rows) > algorithm.max_rows:
            break
        chosen.append(group)
        rows += len(group.rows)
        live += group.live_rows
    return chosen if live >= algorithm.min_live_rows or (flush and live) else []
