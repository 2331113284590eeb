"""The report of an audit: as a table on a terminal, as plain lines, and as JSON."""

import msgspec
from rich.console import Console
from rich.table import Table

from weir.audit.facts import Finding
from weir.audit.totals import Totals
from weir.words import counted


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
