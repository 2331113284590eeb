"""The audit: look, judge, and look again at a live system before anything is called a fault.

What is read at one moment does not fit what is read at the next while agents and the trainer go on: a turn is
appended, a step is acknowledged. A fault stays; so what does not stand in every look is none.
"""

import time
from collections.abc import Sequence

from weir.audit.evidence import gather
from weir.audit.facts import ClientAnswer
from weir.audit.report import Report
from weir.audit.rules import findings_of
from weir.audit.sources import Sources
from weir.audit.totals import notes_of, totals_of

LOOKS = 3
PAUSE_S = 1.0


def audit(sources: Sources, answers: Sequence[ClientAnswer] = (), looks: int = LOOKS) -> Report:
    """Everything that is wrong in each of up to `looks` looks. Raises EvidenceMissing."""
    looked = 1
    evidence = gather(sources, answers)
    findings = findings_of(evidence)
    while findings and looked < looks:
        time.sleep(PAUSE_S)
        looked += 1
        evidence = gather(sources, answers)
        stood = {finding.identity for finding in findings}
        findings = [finding for finding in findings_of(evidence) if finding.identity in stood]
    return Report(
        ok=not findings,
        findings=tuple(findings),
        totals=totals_of(evidence),
        notes=tuple(notes_of(evidence)),
        ledger=evidence.ledger.source,
        answers=len(answers),
        looks=looked,
    )
