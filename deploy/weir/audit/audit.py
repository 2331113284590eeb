"""Audits a run: reads the evidence up to three times, and reports the faults that are in every reading.

On a live system, turns are appended and steps acknowledged while the audit reads, so parts of one reading may
contradict each other. A real fault is found in every reading.
"""

from collections.abc import Sequence

from rollout_queue import clock
from weir.audit.evidence import gather
from weir.audit.facts import ClientAnswer
from weir.audit.report import Report
from weir.audit.rules import findings_of
from weir.audit.sources import Sources
from weir.audit.totals import notes_of, totals_of

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
