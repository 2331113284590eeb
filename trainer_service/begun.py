"""The step in the making: groups that the policy has learned from while it waits for the others.

groups so far ─ others ─▶ those that are new ─ learn ─▶ begun ─▶ … ─▶ step, with the rest
"""

from collections.abc import Callable, Sequence

from trainer_service.algorithm_settings import AlgorithmSettings
from trainer_service.batch import Row
from trainer_service.ranks import Leader
from trainer_service.settlement import Judged


class Begun:
    """What has no step yet. It is not durable: a crash forgets it, and the stream gives its groups again."""

    def __init__(self, policy: Leader) -> None:
        self._policy = policy
        self._groups: set[tuple[str, ...]] = set()
        """By their entries: a group of which something is deleted, say, is another one."""
        self.tokens = 0
        """Trained ones."""

    def others(self, groups: Sequence[Judged]) -> list[Judged]:
        """Those of `groups` that are still to be learned from. Where they lack one that was, all that was
        begun is dropped, and begins anew."""
        by_entries = {_entries(judged): judged for judged in groups}
        if not self._groups <= by_entries.keys():
            self._policy.forget()
            self.end()
        return [judged for entries, judged in by_entries.items() if entries not in self._groups]

    def learn(
        self,
        groups: Sequence[Judged],
        rows: Sequence[Row],
        version: int,
        algorithm: AlgorithmSettings,
        beat: Callable[[], None],
    ) -> None:
        """`rows` are those of `groups`, with their advantages."""
        self._policy.accumulate(rows, version, algorithm, beat)
        self._groups |= {_entries(judged) for judged in groups}
        self.tokens += sum(row.trained_tokens for row in rows)

    def end(self) -> None:
        """There was a step, or none of this will be in one."""
        self._groups, self.tokens = set(), 0


def _entries(judged: Judged) -> tuple[str, ...]:
    return tuple(entry_id for member in judged.group.members for entry_id in member.entry_ids)
