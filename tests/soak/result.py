"""The result of a soak, as a table and as JSON, and whether it is good."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tests.soak.dialects import DIALECTS
from tests.soak.faults import FAULTS
from tests.soak.memory import MemoryRow

JUDGED_MIN = 2.0
"""In a soak of fewer minutes, memory is shown but not judged: the gateways' text caches fill for a minute."""


class CallRow(msgspec.Struct, frozen=True):
    """The calls of one kind: a dialect, REST, or a way to be hostile."""

    kind: str
    statuses: Mapping[str, int]
    p50_ms: float
    p99_ms: float


class SoakResult(msgspec.Struct, frozen=True, kw_only=True):
    """One soak."""

    minutes: float
    agents: int
    seed: int
    calls: tuple[CallRow, ...]
    faults: Mapping[str, int]
    """How often each kind of fault was made."""
    turns: int
    """Whole answers that agents heard. The audit looked for each."""
    unexpected: int
    details: tuple[str, ...]
    """The first unexpected things, in words."""
    memory: tuple[MemoryRow, ...]
    findings: tuple[str, ...]
    """What the audit found."""

    @property
    def faulty(self) -> Sequence[str]:
        """Why the soak failed; empty if it passed."""
        judged = self.minutes >= JUDGED_MIN
        served = {row.kind: sum(row.statuses.values()) for row in self.calls}
        silent = [each.name for each in DIALECTS if not served.get(each.name)]
        return [
            *(f"no call in {name}: the soak shows nothing" for name in silent),
            *(
                f"no {kind}: the soak shows nothing"
                for kind in FAULTS
                if judged and not self.faults.get(kind)
            ),
            *([f"unexpected: {self.unexpected}"] if self.unexpected else []),
            *(f"the memory of {row.gateway} grows" for row in self.memory if judged and not row.flat),
            *([f"findings of the audit: {len(self.findings)}"] if self.findings else []),
        ]

    @property
    def exit_code(self) -> int:
        return 1 if self.faulty else 0


def write(result: SoakResult, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def lines(result: SoakResult) -> list[str]:
    """The table, and what was wrong."""
    rows = [("calls", "statuses", "p50 ms", "p99 ms"), ("---",) * 4]
    for row in result.calls:
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(row.statuses.items()))
        rows.append((row.kind, statuses, f"{row.p50_ms:.0f}", f"{row.p99_ms:.0f}"))
    shown = [f"| {' | '.join(row)} |" for row in rows]
    shown += ["", "| memory, MiB | after a third | at the end | bound | highest |", f"|{' --- |' * 5}"]
    shown += [
        f"| {row.gateway} | {row.first:.0f} | {row.last:.0f} | {row.bound:.0f} | {row.highest:.0f} |"
        for row in result.memory
    ]
    faults = ", ".join(f"{count} of kind {kind}" for kind, count in sorted(result.faults.items()))
    shown += ["", f"{result.turns} answers heard; faults: {faults or 'none'}"]
    shown += [*result.details, *(f"audit: {finding}" for finding in result.findings)]
    return (
        [*shown, *(f"FAULT: {fault}" for fault in result.faulty)] if result.faulty else [*shown, "all well"]
    )
