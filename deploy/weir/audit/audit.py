"""Audits a run: reads the evidence up to three times, and reports the faults that are in every reading: as a
table on a terminal, as plain lines, and as JSON, with the fates of sessions, turns and tokens.

On a live system, turns are appended and steps acknowledged while the audit reads, so parts of one reading may
contradict each other. A real fault is found in every reading.
"""

from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from rollout_queue import clock
from rollout_queue.protocol.conditions import counted
from weir.audit.audit_facts import ClientAnswer, Evidence, Finding, SessionFact, TurnFact
from weir.audit.audit_rules import TRAINED, final_verdict, findings_of
from weir.audit.audit_sources import Sources
from weir.audit.evidence import gather


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


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an audit."""

    ok: bool
    """Whether no fault was found."""
    findings: tuple[Finding, ...]
    totals: Totals
    notes: tuple[str, ...]
    ledger: str
    """Where the ledger was read from."""
    answers: int
    """How many lines of the `--answers` file were checked."""
    looks: int
    """How often the evidence was read. Every reading had each of the findings."""

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1


def as_json(report: Report) -> str:
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def show(report: Report, console: Console) -> None:
    """Print the report: a table on a terminal, plain lines elsewhere."""
    if console.is_terminal:
        console.print(_table(report.totals))
    else:
        for line in _lines(report.totals):
            console.print(line, markup=False, highlight=False)
    for sentence in _facts(report):
        console.print(sentence, markup=False, highlight=False)
    for finding in report.findings:
        line = f"{finding.kind}: {finding.sentence} ({finding.rule})"
        console.print(line, markup=False, highlight=False, style="red")
    console.print(_verdict(report), markup=False, highlight=False, style="green" if report.ok else "red")


def _table(totals: Totals) -> Table:
    table = Table("", "sessions", "turns", "tokens")
    for name, fate in totals.fates.items():
        table.add_row(name, *(f"{number:,}" for number in (fate.sessions, fate.turns, fate.tokens)))
    return table


def _lines(totals: Totals) -> list[str]:
    return [
        f"{name}: {counted(fate.sessions, 'session')}, {counted(fate.turns, 'turn')}, "
        f"{counted(fate.tokens, 'token')}"
        for name, fate in totals.fates.items()
    ]


def _facts(report: Report) -> list[str]:
    totals = report.totals
    lines = [
        f"ledger: {counted(totals.ledger_steps, 'durable step')}, {counted(totals.ledger_turns, 'turn')}, "
        f"{counted(totals.ledger_tokens, 'token')} ({report.ledger})",
        f"stream: {totals.pending} entries pending, {totals.undelivered} not yet delivered; "
        f"{totals.dead_letters} dead letters, {totals.deleted_sessions} deleted sessions",
    ]
    if totals.forgotten_sessions:
        trained = totals.forgotten_trained
        lines.append(
            f"forgotten: {totals.forgotten_sessions} sessions; {trained.sessions} of them were trained, "
            f"with {trained.turns} turns and {trained.tokens} tokens"
        )
    if report.answers:
        lines.append(f"answers: {report.answers} lines of what clients were told is stored were checked")
    return lines + [f"note: {note}" for note in report.notes]


def _verdict(report: Report) -> str:
    if report.ok:
        return "every turn was trained once, waits, or has a final verdict"
    kinds = [finding.kind for finding in report.findings]
    counts = [
        f"{kinds.count(kind)} {kind}" for kind in ("lost", "duplicated", "unexplained") if kind in kinds
    ]
    return f"found {', '.join(counts)}; each was found in {report.looks} readings"


READINGS = 3
PAUSE_S = 1.0


def audit(sources: Sources, answers: Sequence[ClientAnswer] = (), readings: int = READINGS) -> Report:
    """The faults that are found in each of up to `readings` readings. Raises EvidenceMissing."""
    read = 1
    evidence = gather(sources, answers)
    findings = findings_of(evidence)
    while findings and read < readings:
        clock.pause(PAUSE_S)
        read += 1
        evidence = gather(sources, answers)
        known = {finding.identity for finding in findings}
        findings = [finding for finding in findings_of(evidence) if finding.identity in known]
    return Report(
        ok=not findings,
        findings=tuple(findings),
        totals=totals_of(evidence),
        notes=tuple(notes_of(evidence)),
        ledger=evidence.ledger.source,
        answers=len(answers),
        looks=read,
    )
