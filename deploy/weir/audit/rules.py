"""The promise as rules: every turn is trained once, waiting, or closed, and everything else agrees with that.

Evidence ─▶ turns ─ copies ─ sessions ─ entries ─ groups ─ counters ─ answers ─ ledger ─▶ Finding, Finding, …
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from rollout_queue.contract.records import Verdict
from weir.audit.facts import Evidence, Finding, Kind, LedgerRow, SessionFact, TurnFact
from weir.audit.ledger_rules import TOKENS, ledger_findings

OF_GATEWAYS = frozenset({"failed", "abandoned", "expired", "deleted"})
"""Verdicts that a gateway gives, to a session with all its turns. The trainer gives each turn its own beside
its session's, so that a turn without one never reached it."""


def findings_of(evidence: Evidence) -> list[Finding]:
    """Everything that must not be; empty when the promise is kept."""
    return [
        *_turns(evidence),
        *_copies(evidence),
        *_sessions(evidence),
        *_entries(evidence),
        *_groups(evidence),
        *_counters(evidence),
        *_answers(evidence),
        *ledger_findings(evidence),
    ]


def final_verdict(turn: TurnFact, session: SessionFact) -> Verdict | None:
    """What no step can change any more."""
    if turn.verdict is None and session.verdict is not None and session.verdict.code in OF_GATEWAYS:
        return session.verdict
    return turn.verdict


class _Wrong(NamedTuple):
    kind: Kind
    rule: str
    said: str


def _turns(evidence: Evidence) -> Iterator[Finding]:
    """Each turn against the ledger, the stream, its verdict and its session's."""
    for session in evidence.sessions.values():
        for turn in session.turns:
            rows = evidence.trained_by.get(turn.turn_id, ())
            entry_ids = evidence.stream.of(session.session_id, f"t:{turn.turn_id}")
            for wrong in (
                *_twice(rows, entry_ids),
                *_against_the_ledger(turn, final_verdict(turn, session), rows, evidence),
                *_against_the_stream(turn, session, rows, entry_ids),
            ):
                yield _of_turn(turn, session, wrong)


def _of_turn(turn: TurnFact, session: SessionFact, wrong: _Wrong) -> Finding:
    return Finding(
        kind=wrong.kind,
        rule=wrong.rule,
        subject=f"turn {turn.turn_id}",
        sentence=f"turn {turn.turn_id} of session {session.session_id} {wrong.said}",
        session_id=session.session_id,
        turn_id=turn.turn_id,
    )


def _twice(rows: tuple[LedgerRow, ...], entry_ids: tuple[str, ...]) -> Iterator[_Wrong]:
    if len(rows) > 1:
        steps = " and ".join(str(row.step) for row in rows)
        yield _Wrong("duplicated", "trained_twice", f"was trained by steps {steps}")
    if len(entry_ids) > 1:
        places = " and ".join(entry_ids)
        yield _Wrong("duplicated", "appended_twice", f"has several un-acknowledged entries: {places}")


def _against_the_ledger(
    turn: TurnFact, verdict: Verdict | None, rows: tuple[LedgerRow, ...], evidence: Evidence
) -> Iterator[_Wrong]:
    if rows and turn.barred is not None:
        yield _Wrong("unexplained", "barred", f"was trained by step {rows[0].step}, although {turn.barred}")
    if verdict is None:
        return
    if verdict.code != "trained":
        if rows:
            said = f"was trained by step {rows[0].step}, and its verdict is {verdict.code}"
            yield _Wrong("unexplained", "verdict_denies", said)
    elif not rows:
        row = evidence.rows_by_step.get(verdict.step or 0)
        lacks = "has no such step" if row is None else "has that step without it"
        said = f"was acknowledged as trained by step {verdict.step}, and the durable ledger {lacks}"
        yield _Wrong("lost", "acknowledged_before_the_checkpoint", said)
    elif not any((row.step, row.version) == (verdict.step, verdict.version) for row in rows):
        said = (
            f"has the verdict of step {verdict.step}, version {verdict.version}, and was trained by "
            f"step {rows[0].step}, version {rows[0].version}"
        )
        yield _Wrong("unexplained", "other_step", said)


def _against_the_stream(
    turn: TurnFact, session: SessionFact, rows: tuple[LedgerRow, ...], entry_ids: tuple[str, ...]
) -> Iterator[_Wrong]:
    ended = session.verdict.code if session.verdict is not None else None
    if turn.verdict is not None and entry_ids:
        said = f"has the verdict {turn.verdict.code}, and its entry {entry_ids[0]} is not acknowledged"
        yield _Wrong("unexplained", "verdict_and_entry", said)
    if final_verdict(turn, session) is not None or turn.set_aside:
        return
    if entry_ids and ended is not None:
        said = f"waits as entry {entry_ids[0]}, and its session has ended without it: {ended}"
        yield _Wrong("unexplained", "session_over", said)
    elif not entry_ids and rows:
        said = f"was trained by step {rows[0].step}, and acknowledged without a verdict"
        yield _Wrong("unexplained", "no_verdict", said)
    elif not entry_ids:
        why = f"; its session was judged without it: {ended}" if ended else ""
        yield _Wrong("lost", "dropped", f"has neither an un-acknowledged entry nor a verdict{why}")


def _copies(evidence: Evidence) -> Iterator[Finding]:
    """One generation of a session under several ids, and one id in several sessions."""
    owners: dict[str, SessionFact] = {}
    for session in evidence.sessions.values():
        generations: dict[int, TurnFact] = {}
        for turn in session.turns:
            first = generations.setdefault(turn.generation, turn)
            if first is not turn:
                said = f"is the generation of turn {first.turn_id} once more"
                yield _of_turn(turn, session, _Wrong("duplicated", "recorded_twice", said))
            owner = owners.setdefault(turn.turn_id, session)
            if owner is not session:
                said = f"is a turn of session {owner.session_id} as well"
                yield _of_turn(turn, session, _Wrong("duplicated", "in_two_sessions", said))


def _sessions(evidence: Evidence) -> Iterator[Finding]:
    for session_id in sorted(evidence.known_sessions - evidence.sessions.keys() - evidence.tombstones.keys()):
        yield _of_session(session_id, "lost", "no_head", "was opened, and nothing is left of it")
    for session_id in sorted(evidence.sessions.keys() & evidence.tombstones.keys()):
        yield _of_session(session_id, "unexplained", "deleted_and_there", "was deleted, and is there again")
    for session in evidence.sessions.values():
        yield from _session(session, evidence)


def _session(session: SessionFact, evidence: Evidence) -> Iterator[Finding]:
    """A reward or an outcome that the trainer will never hear of lets its whole group wait for ever."""
    session_id = session.session_id
    if session.verdict is None:
        for field in sorted(session.ends - evidence.stream.entries.get(session_id, {}).keys()):
            said = (
                f"would wait for ever: its {_named(field)} has no un-acknowledged entry, nor has it a verdict"
            )
            yield _of_session(session_id, "lost", "end_dropped", said, field)
    waiting = evidence.stream.unreadable.values()
    for field, of_bytes in session.unreadable.items():
        if session.verdict is None and of_bytes not in evidence.dead_letters and of_bytes not in waiting:
            said = f"has a {_named(field)} that this build cannot read, and the stream has no entry of it"
            yield _of_session(session_id, "unexplained", "unreadable", said, field)


def _of_session(session_id: str, kind: Kind, rule: str, said: str, part: str = "") -> Finding:
    return Finding(
        kind=kind,
        rule=rule,
        subject=f"session {session_id} {part}".strip(),
        sentence=f"session {session_id} {said}",
        session_id=session_id,
    )


def _named(field: str) -> str:
    kind, _, name = field.partition(":")
    return {"t": f"turn {name}", "r": f"reward {name!r}"}.get(kind, kind)


def _entries(evidence: Evidence) -> Iterator[Finding]:
    """What waits in the stream must be known to a head; what was deleted leaves a tombstone."""
    for session_id, fields in evidence.stream.entries.items():
        if session_id in evidence.tombstones:
            continue
        session = evidence.sessions.get(session_id)
        known = frozenset[str]() if session is None else session.fields
        for field, entry_ids in fields.items():
            if field not in known:
                why = "there is no such session" if session is None else "its head does not know it"
                said = f"has the un-acknowledged entry {entry_ids[0]} of {_named(field)}, and {why}"
                yield _of_session(session_id, "unexplained", "unknown_entry", said, field)
            elif field.startswith("r:") and len(entry_ids) > 1:
                said = f"has several un-acknowledged entries of {_named(field)}: {' and '.join(entry_ids)}"
                yield _of_session(session_id, "duplicated", "reward_twice", said, field)


def _groups(evidence: Evidence) -> Iterator[Finding]:
    def of_group(name: str, kind: Kind, rule: str, said: str) -> Finding:
        return Finding(kind=kind, rule=rule, subject=f"group {name} {said}", sentence=f"group {name} {said}")

    there = evidence.sessions.keys() | evidence.tombstones.keys()
    for session in evidence.sessions.values():
        group = evidence.groups.get(session.group_id or "")
        if group is not None and session.session_id not in group.members:
            assert session.group_id is not None  # noqa: S101 - it has named the group
            said = f"does not list its member {session.session_id}"
            yield of_group(session.group_id, "unexplained", "member_unlisted", said)
    for name, group in evidence.groups.items():
        gone = group.members - there - evidence.known_sessions
        for member in sorted(gone) if len(gone) > group.forgotten else ():
            yield of_group(name, "lost", "member_gone", f"lists the session {member}, which is not there")
        if group.size is not None and len(group.members) > group.size:
            said = f"was made for {group.size} sessions and has {len(group.members)}"
            yield of_group(name, "unexplained", "too_many", said)


def _counters(evidence: Evidence) -> Iterator[Finding]:
    """The counters were read before and after the heads, and only grow: between them lies the sum of the
    heads and of what is forgotten.

    A session may be deleted meanwhile, and its turns stay counted.
    """
    own = Counter(
        [f"session:{session.verdict.code}" for session in evidence.sessions.values() if session.verdict]
        + [f"turn:{turn.verdict.code}" for _, turn in evidence.turns.values() if turn.verdict]
    )
    gone = {
        "session": len(evidence.tombstones),
        "turn": sum(tombstone.turns for tombstone in evidence.tombstones.values()),
    }
    own["session:deleted"] += len(evidence.tombstones)
    before, after = evidence.forgotten_before, evidence.forgotten_after
    for name in sorted((own.keys() | evidence.counts_after.keys() | after.keys()) - {TOKENS}):
        least, most = evidence.counts_before.get(name, 0), evidence.counts_after.get(name, 0)
        spare = 0 if name == "session:deleted" else gone[name.partition(":")[0]]
        if not (least - spare <= own[name] + after.get(name, 0) and own[name] + before.get(name, 0) <= most):
            said = f"the counter {name} says {most}, and {own[name]} of them have that verdict"
            if name in after:
                said += f"; {after[name]} are forgotten"
            yield Finding(kind="unexplained", rule="counter", subject=f"counter {name}", sentence=said)


def _answers(evidence: Evidence) -> Iterator[Finding]:
    """Whatever a client heard success for must be there, or have been deleted since."""
    for answer in evidence.answers:
        if answer.session_id in evidence.tombstones:
            continue
        session = evidence.sessions.get(answer.session_id)
        fields = frozenset[str]() if session is None else session.fields
        if session is None and evidence.may_be_forgotten:
            continue
        if session is None:
            said = "is not there, and a client was told that it is"
            yield _of_session(answer.session_id, "lost", "answered", said)
        for field in answer.fields:
            if field not in fields:
                said = f"lacks its {_named(field)}, and a client was told of it"
                yield _of_session(answer.session_id, "lost", "answered", said, field)
