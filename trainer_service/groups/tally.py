"""Counts all groups that ended since the last step, also those that no step trains (for example because all
rollouts have the same reward)."""

import re
from collections import Counter, deque
from collections.abc import Sequence

from trainer_service.groups.assemble import Member
from trainer_service.groups.reward_guard import source_of
from trainer_service.groups.screening import ScreenedGroup
from trainer_service.rows.rows import Row, exclusions

STEPS_REMEMBERED = 8
"""Over how many steps `rollouts_per_step` is averaged."""
TOO_OLD = frozenset({"stale", "skipped_for_newer"})
"""Verdicts of rollouts that are lost because more end than the trainer trains."""

TASK_METRIC = "reward/task/"
"""Before the name of a task, whose mean reward is the metric."""
MOST_TASKS = 16
"""The tasks that came first have metrics of their own."""
OTHER_TASKS = "others"
"""All further ones together, and those whose ids are numbers."""
ODD = re.compile(r"[^A-Za-z0-9._:@~=+-]")
"""What the gateway takes in no id."""
MOST_CHARACTERS = 60
NUMBER = re.compile(r"[\W\d_]*")


class TaskRewards:
    """The rewards of each task until the next step. A task is named by its source, so that an environment has
    one curve: `sums-18` and `sums-19` are `sums`."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._rewards: dict[str, list[float]] = {}

    def add(self, task_id: str | None, rewards: Sequence[float]) -> None:
        """Count the rewards of a group. One without a task is counted in the mean of all alone."""
        if task_id is None or not rewards:
            return
        name = ODD.sub("_", source_of(task_id) or task_id)[:MOST_CHARACTERS]
        if NUMBER.fullmatch(name) or (name not in self._names and len(self._names) >= MOST_TASKS):
            name = OTHER_TASKS
        else:
            self._names.add(name)
        self._rewards.setdefault(name, []).extend(rewards)

    def taken(self) -> dict[str, float]:
        """The metrics of the tasks that had groups. Counting starts again."""
        rewards, self._rewards = self._rewards, {}
        return {f"{TASK_METRIC}{name}": sum(each) / len(each) for name, each in sorted(rewards.items())}


class Tally:
    """Counts groups, rewards and verdicts until the next step, and rollouts over the last steps."""

    def __init__(self, rollouts_per_step: int) -> None:
        """`rollouts_per_step` is an estimate. It counts like a step in the mean over the last steps."""
        self._per_step: deque[int] = deque([rollouts_per_step], maxlen=STEPS_REMEMBERED)
        self._tasks = TaskRewards()
        self._reset()

    def _reset(self) -> None:
        self._rewards: list[float] = []
        self._groups = {"live": 0, "zero_var": 0, "singleton": 0}
        self._dropped = 0
        self._too_old = 0
        self._sessions = 0
        self._truncated = 0
        self._relations = Counter[str]()

    def add(self, screened: ScreenedGroup) -> None:
        """Count a group that has ended, without its evaluation sessions."""
        members = [member for member in screened.group.members if member.evaluation is None]
        if not members:
            return
        rewards = [m.reward for m in members if m.rewarded and m.reward is not None]
        self._rewards += rewards
        self._tasks.add(screened.group.task_id, rewards)
        self._count_turns(screened, members)
        verdicts = [verdict for member, verdict in screened.untrained if member.evaluation is None]
        without_advantage = sum(
            verdict is not None and verdict.code == "zero_advantage" for verdict in verdicts
        )
        if screened.skip_reason is None:
            self._groups["live"] += 1
        elif without_advantage > 1:
            self._groups["zero_var"] += 1
        if without_advantage == 1 or len(screened.rollouts) == 1:
            self._groups["singleton"] += 1
        self._sessions += len(members)
        self._dropped += len(verdicts) - without_advantage
        self._too_old += sum(verdict is not None and verdict.code in TOO_OLD for verdict in verdicts)
        self._truncated += sum(verdict is not None and verdict.code == "truncated" for verdict in verdicts)

    def _count_turns(self, screened: ScreenedGroup, members: Sequence[Member]) -> None:
        """Count how the trained turns follow their sessions. Metrics leave out roots and retries."""
        untrained = {member.session_id for member, _ in screened.untrained}
        for member in members:
            if member.session_id not in untrained:
                excluded = exclusions(member.turns)
                self._relations.update(turn.relation for turn in member.turns if turn.turn_id not in excluded)

    @property
    def rollouts_per_step(self) -> float:
        """Rewarded rollouts that end between two steps: the mean over the last steps. Those that are lost as
        too old do not count: gateways would admit as many more, which would be lost as well."""
        return sum(self._per_step) / len(self._per_step)

    def finish_step(self, rows: Sequence[Row]) -> dict[str, float]:
        """The metrics of a step that trained `rows`. Counting starts again at zero."""
        lengths = sorted(int(row.mask_L.sum()) for row in rows)
        metrics: dict[str, float] = {
            "reward_mean": sum(self._rewards) / max(1, len(self._rewards)),
            "rollouts": len(self._rewards),
            "rows": len(rows),
            "tokens": sum(lengths),
            "group/live": self._groups["live"],
            "group/zero_var": self._groups["zero_var"],
            "group/singleton": self._groups["singleton"],
            "group/dropped": self._dropped,
            "len/mean": sum(lengths) / len(lengths),
            "len/p90": lengths[int(0.9 * (len(lengths) - 1))],
            "len/truncated": self._truncated / max(1, self._sessions),
            "drift/clean": self._relations["extends"],
            "drift/realign": self._relations["rerendered"],
            "drift/fork": self._relations["forks"],
            **self._tasks.taken(),
        }
        self._per_step.append(len(self._rewards) - self._too_old)
        self._reset()
        return metrics
