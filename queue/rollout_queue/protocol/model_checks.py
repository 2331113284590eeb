"""The model, checked at the start: what each service finds out about it, as rows of one table.

trainer, rollout server, gateway ─ ModelCheck ─▶ log, status ─▶ `weir doctor`
"""

from typing import Literal

from rollout_queue.protocol.message import ServiceMessage

TITLE = "the model, checked at the start"
Outcome = Literal["right", "differs", "refused", "unknown"]
"""`differs`: something is unusual, and served all the same in a way that is safe; the detail says which."""


class ModelCheck(ServiceMessage):
    """One row."""

    check: str
    outcome: Outcome
    detail: str

    @property
    def line(self) -> str:
        """The row as a line of a log."""
        return f"{TITLE}: {self.check}: {self.outcome}: {self.detail}"
