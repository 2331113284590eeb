"""What is measured of the calls of one dialect."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from gateway.metrics.distribution import Distribution, TimeSpent

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAP_SECONDS: Final = (0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
CLIENT_LEFT: Final = 499
"""The status of a call whose client left before the answer began."""


class CallFigures:
    """The figures of one dialect's calls. Everything else that HTTP serves counts as the dialect `rest`."""

    __slots__ = (
        "dialect",
        "engine_wait",
        "first_token",
        "gaps",
        "ignoring",
        "in_flight",
        "parse",
        "read",
        "record",
        "render",
        "sample",
        "session",
        "statuses",
        "tokenize",
        "wait",
    )

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect
        self.statuses: dict[int, int] = defaultdict(int)
        self.in_flight = 0
        self.ignoring = 0
        """Calls with fields that the gateway did not know, and ignored."""
        self.first_token = Distribution(SECONDS)
        self.gaps = Distribution(GAP_SECONDS)
        self.engine_wait = Distribution(SECONDS)
        self.read = TimeSpent()
        self.session = TimeSpent()
        self.render = TimeSpent()
        self.tokenize = TimeSpent()
        self.wait = TimeSpent()
        self.sample = TimeSpent()
        self.parse = TimeSpent()
        self.record = TimeSpent()

    @property
    def parts(self) -> Mapping[str, TimeSpent]:
        """The parts of a call, in their order."""
        return {
            "read": self.read,
            "session": self.session,
            "render": self.render,
            "tokenize": self.tokenize,
            "wait": self.wait,
            "sample": self.sample,
            "parse": self.parse,
            "record": self.record,
        }

    def rendered(self, seconds: float, tokenizer_s: float) -> None:
        """A prompt was rendered; the tokenizer had a share of the time."""
        self.render.add(seconds - tokenizer_s)
        self.tokenize.add(tokenizer_s)

    def sampled(self, began: float, accepted: float | None, ended: float) -> None:
        """An answer ended, or failed; `accepted` is when the first engine took it, if one did."""
        waited_s = (ended if accepted is None else accepted) - began
        self.engine_wait.add(waited_s)
        self.wait.add(waited_s)
        if accepted is not None:
            self.sample.add(ended - accepted)
