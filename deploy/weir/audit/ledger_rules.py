"""Rules about the ledger itself, and about its rows compared with the turns that they name."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, takewhile

from weir.audit.facts import Evidence, Finding, Kind, LedgerRow

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
