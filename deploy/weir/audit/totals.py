"""Counts sessions, turns and tokens by their fate: trained, waiting, or a verdict."""

from collections.abc import Mapping

import msgspec

from weir.audit.facts import Evidence, SessionFact, TurnFact
from weir.audit.ledger_rules import TRAINED
from weir.audit.rules import final_verdict


class FateCount(msgspec.Struct):
    """How many sessions, turns and tokens have one fate."""

    sessions: int = 0
    turns: int = 0
    tokens: int = 0


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one reading."""

    fates: Mapping[str, FateCount]
    """The keys are `trained`, `waiting`, other verdicts, `set aside` (in the dead letters) and `unaccounted`.
    A session is counted under its verdict."""
    ledger_steps: int
    ledger_turns: int
    ledger_tokens: int
    """The tokens that the durable ledger says were trained."""
    trained_tokens: int
    """The tokens of trained turns: equal to `ledger_tokens` unless sessions were deleted or forgotten."""
    pending: int
    undelivered: int
    dead_letters: int
    deleted_sessions: int
    forgotten_sessions: int
    forgotten_trained: FateCount
    """How many of the forgotten sessions were trained, with their turns and tokens."""


def totals_of(evidence: Evidence) -> Totals:
    fates: dict[str, FateCount] = {"trained": FateCount(), "waiting": FateCount()}
    for session in evidence.sessions.values():
        fates.setdefault(session.verdict.code if session.verdict else "waiting", FateCount()).sessions += 1
        for turn in session.turns:
            fate = fates.setdefault(fate_of(turn, session, evidence), FateCount())
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
        forgotten_trained=FateCount(*(evidence.forgotten_after.get(name, 0) for name in TRAINED)),
    )


def fate_of(turn: TurnFact, session: SessionFact, evidence: Evidence) -> str:
    """The fate of a turn. A turn that a durable step trained is `trained`, whatever its verdict says."""
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
    """Facts that the user should know and that are no faults."""
    notes = [evidence.ledger.remark] if evidence.ledger.remark else []
    notes += evidence.losses
    if unlisted := _unlisted(evidence):
        notes.append(
            f"{unlisted} trained sessions are not in weir:trained, so their versions' lineage lacks them"
        )
    commands = [row for row in evidence.ledger.rows if row.of_commands]
    if commands:
        tokens = sum(row.tokens for row in commands)
        notes.append(
            f"{len(commands)} steps, with {tokens} tokens, were made by commands of users' loops; the ledger "
            "does not name these commands, so the audit does not count them"
        )
    unknown = {
        version: None
        for _, turn in evidence.turns.values()
        for version in turn.versions
        if version not in evidence.policies
    }
    if unknown:
        versions = ", ".join(map(str, sorted(unknown)))
        notes.append(f"turns were sampled by versions without a policy record: {versions}")
    if evidence.dead_letters:
        notes.append(f"{len(evidence.dead_letters)} records could not be decoded and are in the dead letters")
    if evidence.stream.unreadable:
        unreadable = ", ".join(evidence.stream.unreadable)
        notes.append(f"the stream has entries that this build cannot decode: {unreadable}")
    if evidence.vanished_answers and evidence.may_be_forgotten:
        notes.append(
            f"{len(evidence.vanished_answers)} sessions of the given answers do not exist; they may be "
            f"among the {evidence.forgotten_sessions} that were forgotten"
        )
    if evidence.stream.vanished:
        notes.append(f"{evidence.stream.vanished} pending entries were deleted from the stream")
    entries = evidence.stream.entries
    left = sorted(
        name for name in entries if name in evidence.tombstones and set(entries[name]) - {"deletion"}
    )
    if left:
        notes.append(f"entries of deleted sessions are still in the stream: {', '.join(left)}")
    return notes


def _unlisted(evidence: Evidence) -> int:
    """How many trained sessions are not in the index of them; 0 if there is none, as in older builds."""
    if not evidence.taught:
        return 0
    trained = (
        each for each in evidence.sessions.values() if each.verdict and each.verdict.version is not None
    )
    return sum(each.session_id not in evidence.taught for each in trained)
