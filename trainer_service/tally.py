"""What ended between two steps, trained or not: the rewards of a batch alone would hide what was easy."""

from collections.abc import Sequence

from trainer_service.batch import Row
from trainer_service.settlement import Judged


class Tally:
    """Counts groups, rewards and verdicts until the next step."""

    def __init__(self) -> None:
        self._rewards: list[float] = []
        self._groups = {"live": 0, "zero_var": 0, "singleton": 0}
        self._dropped = 0
        self._sessions = 0
        self._truncated = 0

    def add(self, judged: Judged) -> None:
        self._rewards += judged.rewards
        verdicts = [verdict for _, verdict in judged.untrained]
        compared = sum(verdict is not None and verdict.code == "zero_advantage" for verdict in verdicts)
        kind = "live" if judged.silence is None else "singleton" if compared < 2 else "zero_var"
        self._groups[kind] += 1
        self._sessions += len(judged.group.members)
        self._dropped += len(verdicts) - compared
        self._truncated += sum(verdict is not None and verdict.code == "truncated" for verdict in verdicts)

    @property
    def rollouts(self) -> int:
        """How many rewarded rollouts ended, trained or not."""
        return len(self._rewards)

    def values(self, rows: Sequence[Row]) -> dict[str, float]:
        lengths = sorted(int(row.mask_L.sum()) for row in rows)
        return {
            "reward_mean": sum(self._rewards) / max(1, len(self._rewards)),
            "rollouts": self.rollouts,
            "rows": len(rows),
            "tokens": sum(lengths),
            "group/live": self._groups["live"],
            "group/zero_var": self._groups["zero_var"],
            "group/singleton": self._groups["singleton"],
            "group/dropped": self._dropped,
            "len/mean": sum(lengths) / len(lengths),
            "len/p90": lengths[int(0.9 * (len(lengths) - 1))],
            "len/truncated": self._truncated / max(1, self._sessions),
        }
