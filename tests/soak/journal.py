"""Writes down what the agents hear: statuses and times of calls, whole answers, and what nobody expected."""

import json
import statistics
from collections import Counter, defaultdict
from pathlib import Path

MOST_DETAILS = 50
"""How many unexpected things are kept in words; all are counted."""


class Journal:
    """The agents of one soak share it. Whole answers go to a file that the audit reads."""

    def __init__(self, answers: Path) -> None:
        self._answers = answers.open("a", encoding="utf-8")
        self.statuses: dict[str, Counter[str]] = defaultdict(Counter)
        """By kind of call (a dialect, or a way to be hostile)."""
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.unexpected = 0
        self.details: list[str] = []
        self.refused: list[str] = []
        """What innocent agents heard whose calls were refused because engines had died of them."""
        self.turns = 0
        """How many whole answers were heard."""

    def close(self) -> None:
        self._answers.close()

    def called(self, kind: str, status: int | None, seconds: float = 0.0) -> None:
        self.statuses[kind]["no reply" if status is None else str(status)] += 1
        self.seconds[kind].append(seconds)

    def heard(self, session_id: str, turn_ids: list[str]) -> None:
        """An agent heard a whole answer."""
        self.turns += len(turn_ids)
        for turn_id in turn_ids:
            self._write({"session_id": session_id, "turn_id": turn_id})

    def finished(self, session_id: str) -> None:
        self._write({"session_id": session_id, "finished": True, "reward_key": "finish"})

    def surprised(self, what: str) -> None:
        """Something happened that must not happen."""
        self.unexpected += 1
        if len(self.details) < MOST_DETAILS:
            self.details.append(what[:500])

    def quantile_ms(self, kind: str, percent: int) -> float:
        times = self.seconds[kind]
        if len(times) < 2:
            return 1000 * sum(times)
        return 1000 * statistics.quantiles(times, n=100, method="inclusive")[percent - 1]

    def _write(self, answer: dict[str, str | bool]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()
