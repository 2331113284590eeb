"""The rules of the audit: every turn was trained once, waits, or has a final verdict; all counts agree; and
the ledger's rows agree with the turns that they name.

Evidence ─▶ turns ─ copies ─ sessions ─ entries ─ groups ─ counters ─ answers ─ ledger ─▶ Finding, Finding, …
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, takewhile
from typing import NamedTuple

from rollout_queue.contract.records import Verdict
from weir.audit.audit_facts import Evidence, Finding, Kind, LedgerRow, SessionFact, TurnFact

TOKENS = "tokens:trained"
"""Counts the trained tokens of forgotten sessions. All other counters of these sessions count verdicts."""
TRAINED = {"session:trained": "sessions", "turn:trained": "turns", TOKENS: "tokens"}


def ledger_findings(evidence: Evidence) -> Iterator[Finding]:
    yield from _order(evidence.ledger.rows)
    of_turns = [row for row in evidence.ledger.rows if not row.of_commands]
    vanished = list(takewhile(lambda row: _is_unknown(row, evidence), of_turns))
    if len(vanished) > 1 and not evidence.forgotten_after.get("turn:trained"):
        said = (
            f"Redis has no trace of the steps {vanished[0].step} to {vanished[-1].step}, which the ledger "
            "has: Redis came back empty, or with an older state"
        )
        yield Finding(kind="unexplained", rule="redis_emptied", subject="Redis", sentence=said)
    else:
        vanished = []
    gone = {row.step for row in vanished}
    for row in evidence.ledger.rows:
        if row.step not in gone:
            yield from _row(row, evidence)
    if evidence.forgotten_after.get("turn:trained"):
        yield from _forgotten(evidence)


def _is_unknown(row: LedgerRow, evidence: Evidence) -> bool:
    """Whether Redis has no turn and no session of the step, and no tombstone of such a session."""
    sessions = evidence.sessions.keys() | evidence.tombstones.keys()
    return not evidence.turns.keys() & set(row.turns) and not sessions & set(row.sessions)


def _of_step(row: LedgerRow, kind: Kind, rule: str, said: str) -> Finding:
    return Finding(kind=kind, rule=rule, subject=f"step {row.step}", sentence=f"step {row.step} {said}")


def _order(rows: tuple[LedgerRow, ...]) -> Iterator[Finding]:
    """Steps are 1, 2, 3 …, one row each. Versions grow, because a version names one set of weights."""
    if rows and rows[0].step != 1:
        yield _of_step(rows[0], "lost", "step_missing", "is the first of the ledger")
    for before, row in pairwise(rows):
        if row.step <= before.step:
            said = f"comes after step {before.step} in the ledger"
            yield _of_step(row, "duplicated", "steps_not_growing", said)
        elif row.step != before.step + 1:
            yield _of_step(row, "lost", "step_missing", f"follows step {before.step} in the ledger")
        if row.version <= before.version:
            said = f"made version {row.version}, after step {before.step} had made version {before.version}"
            yield _of_step(row, "duplicated", "versions_not_growing", said)


def _row(row: LedgerRow, evidence: Evidence) -> Iterator[Finding]:
    if not row.durable:
        yield _of_step(
            row, "unexplained", "not_durable", "is in the durable ledger, but is marked as not durable"
        )
    if row.of_commands:
        return
    known = [evidence.turns[turn_id] for turn_id in row.turns if turn_id in evidence.turns]
    unknown = [turn_id for turn_id in row.turns if turn_id not in evidence.turns]
    gone = [evidence.tombstones[session] for session in row.sessions if session in evidence.tombstones]
    forgotten = evidence.forgotten_after.get("turn:trained", 0)
    if len(unknown) > sum(tombstone.turns for tombstone in gone) + forgotten:
        said = f"trained turns that no session has: {', '.join(unknown)}"
        yield _of_step(row, "unexplained", "unknown_turns", said)
    tokens = sum(turn.tokens for _, turn in known)
    if tokens > row.tokens or (tokens < row.tokens and not unknown):
        said = f"trained {row.tokens} tokens, but its turns have {tokens}"
        yield _of_step(row, "unexplained", "tokens", said)
    listed, found = set(row.sessions), {session.session_id for session, _ in known}
    if found - listed or (listed - found - evidence.tombstones.keys() and not unknown):
        said = (
            f"names the sessions {', '.join(sorted(listed))}, but its turns are of {', '.join(sorted(found))}"
        )
        yield _of_step(row, "unexplained", "sessions", said)


def _forgotten(evidence: Evidence) -> Iterator[Finding]:
    """The rows must name as many unknown sessions, turns and tokens as were forgotten after their training.

    A tombstone does not say how many of its turns were trained, so deleted sessions leave a margin.
    """
    missed: Counter[str] = Counter()
    spare: Counter[str] = Counter()
    for row in evidence.ledger.rows:
        known = [evidence.turns[turn_id] for turn_id in row.turns if turn_id in evidence.turns]
        gone = [evidence.tombstones[name] for name in row.sessions if name in evidence.tombstones]
        missing = len(row.turns) - len(known)
        spare["turn:trained"] += min(missing, sum(tombstone.turns for tombstone in gone))
        if missing:
            tokens = row.tokens - sum(turn.tokens for _, turn in known)
            sessions = {*row.sessions} - evidence.tombstones.keys() - {each.session_id for each, _ in known}
            missed += Counter({"turn:trained": missing, TOKENS: tokens, "session:trained": len(sessions)})
            spare[TOKENS] += tokens if gone else 0
    for name, what in TRAINED.items():
        least, most = evidence.forgotten_before.get(name, 0), evidence.forgotten_after.get(name, 0)
        if not least <= missed[name] <= most + spare[name]:
            said = (
                f"the ledger has {missed[name]} trained {what} that no session has, but {most} were forgotten"
            )
            yield Finding(kind="unexplained", rule="forgotten", subject=f"forgotten {what}", sentence=said)


GIVEN_BY_GATEWAYS = frozenset({"failed", "abandoned", "expired", "deleted"})
"""Verdicts that a gateway gives to a session, and so to all of its turns. In sessions with other verdicts,
the trainer gives every turn a verdict of its own, so a turn without one never reached the trainer."""


def findings_of(evidence: Evidence) -> list[Finding]:
    """Every fault; empty if there is none."""
    return [
        *_turns(evidence),
        *_copies(evidence),
        *_sessions(evidence),
        *_entries(evidence),
        *_groups(evidence),
        *_index(evidence),
        *_counters(evidence),
        *_answers(evidence),
        *ledger_findings(evidence),
    ]


def final_verdict(turn: TurnFact, session: SessionFact) -> Verdict | None:
    """The verdict that no later step can change; None while there is none."""
    if turn.verdict is None and session.verdict is not None and session.verdict.code in GIVEN_BY_GATEWAYS:
        return session.verdict
    return turn.verdict


class _Fault(NamedTuple):
    kind: Kind
    rule: str
    said: str
    """The rest of a sentence about the turn."""


def _turns(evidence: Evidence) -> Iterator[Finding]:
    """Compares each turn with the ledger, the stream, its verdict and its session's verdict."""
    for session in evidence.sessions.values():
        for turn in session.turns:
            rows = evidence.trained_by.get(turn.turn_id, ())
            entry_ids = evidence.stream.of(session.session_id, f"t:{turn.turn_id}")
            for fault in (
                *_twice(rows, entry_ids),
                *_against_the_ledger(turn, final_verdict(turn, session), rows, evidence),
                *_against_the_stream(turn, session, rows, entry_ids),
                *_numbers(turn),
            ):
                yield _of_turn(turn, session, fault)


def _of_turn(turn: TurnFact, session: SessionFact, fault: _Fault) -> Finding:
    return Finding(
        kind=fault.kind,
        rule=fault.rule,
        subject=f"turn {turn.turn_id}",
        sentence=f"turn {turn.turn_id} of session {session.session_id} {fault.said}",
        session_id=session.session_id,
        turn_id=turn.turn_id,
    )


def _twice(rows: tuple[LedgerRow, ...], entry_ids: tuple[str, ...]) -> Iterator[_Fault]:
    if len(rows) > 1:
        steps = " and ".join(str(row.step) for row in rows)
        yield _Fault("duplicated", "trained_twice", f"was trained by steps {steps}")
    if len(entry_ids) > 1:
        places = " and ".join(entry_ids)
        yield _Fault("duplicated", "appended_twice", f"has several unacknowledged entries: {places}")


def _against_the_ledger(
    turn: TurnFact, verdict: Verdict | None, rows: tuple[LedgerRow, ...], evidence: Evidence
) -> Iterator[_Fault]:
    if rows and turn.barred is not None:
        yield _Fault("unexplained", "barred", f"was trained by step {rows[0].step}, although {turn.barred}")
    if verdict is None:
        return
    if verdict.code != "trained":
        if rows:
            said = f"was trained by step {rows[0].step}, but its verdict is {verdict.code}"
            yield _Fault("unexplained", "verdict_denies", said)
    elif not rows:
        row = evidence.rows_by_step.get(verdict.step or 0)
        lacks = "has no such step" if row is None else "has that step without this turn"
        said = f"was acknowledged as trained by step {verdict.step}, but the durable ledger {lacks}"
        yield _Fault("lost", "acknowledged_before_the_checkpoint", said)
    elif not any((row.step, row.version) == (verdict.step, verdict.version) for row in rows):
        said = (
            f"has the verdict of step {verdict.step}, version {verdict.version}, but was trained by "
            f"step {rows[0].step}, version {rows[0].version}"
        )
        yield _Fault("unexplained", "other_step", said)


def _against_the_stream(
    turn: TurnFact, session: SessionFact, rows: tuple[LedgerRow, ...], entry_ids: tuple[str, ...]
) -> Iterator[_Fault]:
    ended = session.verdict.code if session.verdict is not None else None
    if turn.verdict is not None and entry_ids:
        said = f"has the verdict {turn.verdict.code}, but its entry {entry_ids[0]} is not acknowledged"
        yield _Fault("unexplained", "verdict_and_entry", said)
    if final_verdict(turn, session) is not None or turn.set_aside:
        return
    if entry_ids and ended is not None:
        said = f"waits as entry {entry_ids[0]}, but its session already has the verdict {ended}"
        yield _Fault("unexplained", "session_over", said)
    elif not entry_ids and rows:
        said = f"was trained by step {rows[0].step}, but acknowledged without a verdict"
        yield _Fault("unexplained", "no_verdict", said)
    elif not entry_ids:
        why = f"; its session already has the verdict {ended}" if ended else ""
        yield _Fault("lost", "dropped", f"has neither an unacknowledged entry nor a verdict{why}")


def _numbers(turn: TurnFact) -> Iterator[_Fault]:
    """What a step has stored of a turn's tokens lies beside the verdict of that step."""
    if turn.numbers is None:
        return
    if turn.verdict is None or turn.verdict.code != "trained":
        named = "no verdict" if turn.verdict is None else f"the verdict {turn.verdict.code}"
        yield _Fault("unexplained", "numbers", f"has numbers of a step, and {named}")
    elif turn.numbers < 0:
        yield _Fault("unexplained", "numbers", "has numbers of its step that cannot be read")
    elif turn.numbers != turn.tokens:
        said = f"has {turn.tokens} tokens, and numbers of its step for {turn.numbers}"
        yield _Fault("unexplained", "numbers", said)


def _index(evidence: Evidence) -> Iterator[Finding]:
    """Each session in the index of trained ones has taught that version. Older builds kept no index."""
    for session_id, version in evidence.taught.items():
        session = evidence.sessions.get(session_id)
        if session is None:
            said = f"is in the index of version {version}, and does not exist"
        elif session.verdict is None or session.verdict.version != version:
            said = f"is in the index of version {version}, and its verdict does not say so"
        else:
            continue
        yield _of_session(session_id, "unexplained", "index", said)


def _copies(evidence: Evidence) -> Iterator[Finding]:
    """Finds a generation that is recorded under several turn ids, and a turn id that several sessions
    have."""
    owners: dict[str, SessionFact] = {}
    for session in evidence.sessions.values():
        generations: dict[int, TurnFact] = {}
        for turn in session.turns:
            first = generations.setdefault(turn.generation, turn)
            if first is not turn:
                said = f"is the same generation as turn {first.turn_id}"
                yield _of_turn(turn, session, _Fault("duplicated", "recorded_twice", said))
            owner = owners.setdefault(turn.turn_id, session)
            if owner is not session:
                said = f"is also a turn of session {owner.session_id}"
                yield _of_turn(turn, session, _Fault("duplicated", "in_two_sessions", said))


def _sessions(evidence: Evidence) -> Iterator[Finding]:
    for session_id in sorted(evidence.known_sessions - evidence.sessions.keys() - evidence.tombstones.keys()):
        yield _of_session(session_id, "lost", "no_head", "was opened, but has no head")
    for session_id in sorted(evidence.sessions.keys() & evidence.tombstones.keys()):
        yield _of_session(session_id, "unexplained", "deleted_and_there", "was deleted, but has a head again")
    for session in evidence.sessions.values():
        yield from _session(session, evidence)


def _session(session: SessionFact, evidence: Evidence) -> Iterator[Finding]:
    """Finds rewards and outcomes that the trainer will never get, so that the session's group would wait for
    ever."""
    session_id = session.session_id
    if session.verdict is None:
        for field in sorted(session.ends - evidence.stream.entries.get(session_id, {}).keys()):
            said = f"has no verdict and would wait for ever: its {_named(field)} has no unacknowledged entry"
            yield _of_session(session_id, "lost", "end_dropped", said, field)
    for sha256 in sorted(session.images & evidence.missing_images):
        yield _of_session(session_id, "lost", "no_image", f"shows the image {sha256}, which is gone", sha256)
    waiting = evidence.stream.unreadable.values()
    for field, record in session.unreadable.items():
        if session.verdict is None and record not in evidence.dead_letters and record not in waiting:
            said = f"has a {_named(field)} that this build cannot read, and that has no entry in the stream"
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
    """Each entry of the stream must be in its session's head, unless a tombstone has replaced the head."""
    for session_id, fields in evidence.stream.entries.items():
        if session_id in evidence.tombstones:
            continue
        session = evidence.sessions.get(session_id)
        known = frozenset[str]() if session is None else session.fields
        for field, entry_ids in fields.items():
            if field not in known:
                why = "no such session exists" if session is None else "its head does not have it"
                said = f"has the unacknowledged entry {entry_ids[0]} of {_named(field)}, but {why}"
                yield _of_session(session_id, "unexplained", "unknown_entry", said, field)
            elif field.startswith("r:") and len(entry_ids) > 1:
                said = f"has several unacknowledged entries of {_named(field)}: {' and '.join(entry_ids)}"
                yield _of_session(session_id, "duplicated", "reward_twice", said, field)


def _groups(evidence: Evidence) -> Iterator[Finding]:
    def of_group(name: str, kind: Kind, rule: str, said: str) -> Finding:
        return Finding(kind=kind, rule=rule, subject=f"group {name} {said}", sentence=f"group {name} {said}")

    there = evidence.sessions.keys() | evidence.tombstones.keys()
    for session in evidence.sessions.values():
        group = evidence.groups.get(session.group_id or "")
        if group is not None and session.session_id not in group.members:
            assert session.group_id is not None  # noqa: S101 - it was the key of `groups`
            said = f"does not list its member {session.session_id}"
            yield of_group(session.group_id, "unexplained", "member_unlisted", said)
    for name, group in evidence.groups.items():
        gone = group.members - there - evidence.known_sessions
        for member in sorted(gone) if len(gone) > group.forgotten else ():
            yield of_group(name, "lost", "member_gone", f"lists the session {member}, which does not exist")
        if group.size is not None and len(group.members) > group.size:
            said = f"was made for {group.size} sessions but has {len(group.members)}"
            yield of_group(name, "unexplained", "too_many", said)


def _counters(evidence: Evidence) -> Iterator[Finding]:
    """Compares the counters of verdicts with the heads.

    The counters were read before and after the heads, and only deletions reduce them. So the number of heads
    and of forgotten sessions must lie between the two values, with a margin for deleted sessions.
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
            said = f"the counter {name} is {most}, but {own[name]} have that verdict"
            if name in after:
                said += f", and {after[name]} were forgotten"
            yield Finding(kind="unexplained", rule="counter", subject=f"counter {name}", sentence=said)


def _answers(evidence: Evidence) -> Iterator[Finding]:
    """Everything that an answer says was stored must exist, unless it was deleted or forgotten since."""
    for answer in evidence.answers:
        if answer.session_id in evidence.tombstones:
            continue
        session = evidence.sessions.get(answer.session_id)
        fields = frozenset[str]() if session is None else session.fields
        if session is None and evidence.may_be_forgotten:
            continue
        if session is None:
            said = "does not exist, but a client was told that it does"
            yield _of_session(answer.session_id, "lost", "answered", said)
        for field in answer.fields:
            if field not in fields:
                said = f"lacks its {_named(field)}, but a client was told that it was stored"
                yield _of_session(answer.session_id, "lost", "answered", said, field)
