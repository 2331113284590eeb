"""How much there is of everything: sessions, turns and tokens by what became of them."""

from collections.abc import Mapping

import msgspec

from weir.audit.facts import Evidence, SessionFact, TurnFact
from weir.audit.ledger_rules import TRAINED
from weir.audit.rules import final_verdict


class Sum(msgspec.Struct):
    """Of one fate."""

    sessions: int = 0
    turns: int = 0
    tokens: int = 0


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    fates: Mapping[str, Sum]
    """By `trained`, `waiting`, a verdict, `set aside`, or `unaccounted`; a session by its own verdict."""
    ledger_steps: int
    ledger_turns: int
    ledger_tokens: int
    """What the durable ledger says was trained; the tokens of trained turns are the same number."""
    trained_tokens: int
    pending: int
    undelivered: int
    dead_letters: int
    deleted_sessions: int
    forgotten_sessions: int
    forgotten_trained: Sum
    """Of those: what the ledger has of it, and no session of Redis."""


def totals_of(evidence: Evidence) -> Totals:
    fates: dict[str, Sum] = {"trained": Sum(), "waiting": Sum()}
    for session in evidence.sessions.values():
        fates.setdefault(session.verdict.code if session.verdict else "waiting", Sum()).sessions += 1
        for turn in session.turns:
            fate = fates.setdefault(fate_of(turn, session, evidence), Sum())
            fate.turns += 1
            fate.tokens += turn.tokens
    rows = evidence.ledger.rows
    return Totals(
        fates=fates,
        ledger_steps=len(rows),
        ledger_turns=sum(len(row.turns) for row in rows),
        ledger_tokens=sum(row.tokens for row in rows),
        trained_tokens=fates["trained"].tokens,
        pending=evidence.stream.pending,
        undelivered=evidence.stream.undelivered,
        dead_letters=len(evidence.dead_letters),
        deleted_sessions=len(evidence.tombstones),
        forgotten_sessions=evidence.forgotten_sessions,
        forgotten_trained=Sum(*(evidence.forgotten_after.get(name, 0) for name in TRAINED)),
    )


def fate_of(turn: TurnFact, session: SessionFact, evidence: Evidence) -> str:
    """What became of a turn. Trained is what a durable step trained, whatever else is said of it."""
    verdict = final_verdict(turn, session)
    if turn.turn_id in evidence.trained_by:
        return "trained"
    if verdict is not None:
        return verdict.code if verdict.code != "trained" else "unaccounted"
    if turn.set_aside:
        return "set aside"
    waits = evidence.stream.of(session.session_id, f"t:{turn.turn_id}")
    return "waiting" if waits else "unaccounted"


def notes_of(evidence: Evidence) -> list[str]:
    """What a reader should know, and what is no fault."""
    notes = [evidence.ledger.remark] if evidence.ledger.remark else []
    strange = {
        version: None
        for _, turn in evidence.turns.values()
        for version in turn.versions
        if version not in evidence.policies
    }
    if strange:
        versions = ", ".join(map(str, sorted(strange)))
        notes.append(f"turns were sampled by versions that no policy record knows: {versions}")
    if evidence.dead_letters:
        notes.append(f"{len(evidence.dead_letters)} records were set aside unread, with their bytes")
    if evidence.stream.unreadable:
        unread = ", ".join(evidence.stream.unreadable)
        notes.append(f"entries that this build cannot read wait in the stream: {unread}")
    if evidence.vanished_answers and evidence.may_be_forgotten:
        notes.append(
            f"{len(evidence.vanished_answers)} sessions that clients were told of are not there, and may be "
            f"among the {evidence.forgotten_sessions} that are forgotten"
        )
    if evidence.stream.vanished:
        notes.append(f"{evidence.stream.vanished} pending entries are gone from the stream")
    entries = evidence.stream.entries
    left = sorted(
        name for name in entries if name in evidence.tombstones and set(entries[name]) - {"deletion"}
    )
    if left:
        notes.append(f"entries of deleted sessions are still in the stream: {', '.join(left)}")
    return notes
