"""What ended between two steps, trained or not: the rewards of a batch alone would hide what was easy."""

from collections import Counter
from collections.abc import Sequence

from trainer_service.groups.assemble import Member
from trainer_service.groups.settlement import ScreenedGroup
from trainer_service.rows.rows import Row
from trainer_service.rows.turns import exclusions


class Tally:
    """Counts groups, rewards and verdicts until the next step."""

    def __init__(self) -> None:
        self._rewards: list[float] = []
        self._groups = {"live": 0, "zero_var": 0, "singleton": 0}
        self._dropped = 0
        self._sessions = 0
        self._truncated = 0
        self._drift = Counter[str]()

    def add(self, judged: ScreenedGroup) -> None:
        """Sessions of evaluation are counted by version, and not here."""
        members = [member for member in judged.group.members if member.evaluation is None]
        if not members:
            return
        self._rewards += [m.reward for m in members if m.rewarded and m.reward is not None]
        self._count_turns(judged, members)
        verdicts = [verdict for member, verdict in judged.untrained if member.evaluation is None]
        compared = sum(verdict is not None and verdict.code == "zero_advantage" for verdict in verdicts)
        if judged.silence is None:
            self._groups["live"] += 1
        elif compared > 1:
            self._groups["zero_var"] += 1
        if compared == 1 or len(judged.rollouts) == 1:
            self._groups["singleton"] += 1
        self._sessions += len(members)
        self._dropped += len(verdicts) - compared
        self._truncated += sum(verdict is not None and verdict.code == "truncated" for verdict in verdicts)

    def _count_turns(self, judged: ScreenedGroup, members: Sequence[Member]) -> None:
        """How the trained turns stand to the conversation before them; roots and retries are not counted."""
        untrained = {member.session_id for member, _ in judged.untrained}
        for member in members:
            if member.session_id not in untrained:
                excluded = exclusions(member.turns)
                self._drift.update(turn.relation for turn in member.turns if turn.turn_id not in excluded)

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
            "drift/clean": self._drift["extends"],
            "drift/realign": self._drift["rerendered"],
            "drift/fork": self._drift["forks"],
        }
