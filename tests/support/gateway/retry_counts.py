"""Counts how often retries joined a call, and how often clients left one."""

from dataclasses import dataclass, field
from weakref import ref

from gateway.edge.calls import InFlightCall


@dataclass
class RetryCounts:
    """The calls that retries joined, once for each retry, and how often a client left a call."""

    calls: list[ref[InFlightCall]] = field(default_factory=list)
    left: int = 0

    @property
    def joined(self) -> int:
        return len(self.calls)
