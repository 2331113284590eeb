"""What must hold of the ledger by itself, and of its rows against the turns that they name."""

from collections.abc import Iterator
from itertools import pairwise

from weir.audit.facts import Evidence, Finding, Kind, LedgerRow


def ledger_findings(evidence: Evidence) -> Iterator[Finding]:
    yield from _order(evidence.ledger.rows)
    for row in evidence.ledger.rows:
        yield from _row(row, evidence)


def _of_step(row: LedgerRow, kind: Kind, rule: str, said: str) -> Finding:
    return Finding(kind=kind, rule=rule, subject=f"step {row.step}", sentence=f"step {row.step} {said}")


def _order(rows: tuple[LedgerRow, ...]) -> Iterator[Finding]:
    """One row for each step from the first on; a version names one set of weights for ever."""
    if rows and rows[0].step != 1:
        yield _of_step(rows[0], "lost", "step_missing", "is the first of the ledger")
    for before, row in pairwise(rows):
        if row.step <= before.step:
            said = f"stands behind step {before.step} in the ledger"
            yield _of_step(row, "duplicated", "steps_not_growing", said)
        elif row.step != before.step + 1:
            yield _of_step(row, "lost", "step_missing", f"follows step {before.step} in the ledger")
        if row.version <= before.version:
            said = f"made version {row.version}, after step {before.step} had made version {before.version}"
            yield _of_step(row, "duplicated", "versions_not_growing", said)


def _row(row: LedgerRow, evidence: Evidence) -> Iterator[Finding]:
    if not row.durable:
        yield _of_step(
            row, "unexplained", "not_durable", "is in the durable ledger, and says it is not durable"
        )
    known = [evidence.turns[turn_id] for turn_id in row.turns if turn_id in evidence.turns]
    unknown = [turn_id for turn_id in row.turns if turn_id not in evidence.turns]
    gone = [evidence.tombstones[session] for session in row.sessions if session in evidence.tombstones]
    if len(unknown) > sum(tombstone.turns for tombstone in gone):
        said = f"trained what no session knows: {', '.join(unknown)}"
        yield _of_step(row, "unexplained", "unknown_turns", said)
    tokens = sum(turn.tokens for _, turn in known)
    if tokens > row.tokens or (tokens < row.tokens and not unknown):
        said = f"trained {row.tokens} tokens, and its turns have {tokens}"
        yield _of_step(row, "unexplained", "tokens", said)
    told, found = set(row.sessions), {session.session_id for session, _ in known}
    if found - told or (told - found - evidence.tombstones.keys() and not unknown):
        said = (
            f"names the sessions {', '.join(sorted(told))}, and its turns are of {', '.join(sorted(found))}"
        )
        yield _of_step(row, "unexplained", "sessions", said)
