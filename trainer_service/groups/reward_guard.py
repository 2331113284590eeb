"""Compares the rewards of each task with its own earlier ones.

    the mean reward of a group ─┬─▶ the series of its task, if the task has come before
                                └─▶ the series of its source, which has all of the source's tasks

A new task has no best. Where tasks never repeat, or are many, the series of the source tells a fall long
before that of a single task. It tells none because other tasks of the source have come.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import NamedTuple, Self

import msgspec

from trainer_service.settings import GuardSettings

PART = re.compile(r"[^\W_]+")
COUNTER = re.compile(r"\d+|(?=[a-f]*\d)[0-9a-f]{4,}|[0-9a-f]{8,}", re.IGNORECASE)
"""A number, or a part of a random id."""


def source_of(task_id: str) -> str:
    """The id without its last part and without the counters before it; empty if nothing is left."""
    names = [match.span() for match in PART.finditer(task_id)][:-1]
    while names and COUNTER.fullmatch(task_id, *names[-1]):
        names.pop()
    return task_id[: names[-1][1]] if names else ""


NOISE = 5.0
"""A fall of the mean reward raises an alarm only if it is greater than this many standard errors."""
VALUES_KEPT = 2**16
"""All series together keep about as many rewards, and at least FEWEST_KEPT series."""
FEWEST_KEPT = 32


class Spread(msgspec.Struct, frozen=True):
    """The number, mean and sum of squared distances from the mean of some rewards, by Welford's algorithm."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, rewards: Sequence[float]) -> Self:
        mean = fmean(rewards)
        return cls(len(rewards), mean, sum((reward - mean) ** 2 for reward in rewards))

    def plus(self, reward: float) -> "Spread":
        count = self.count + 1
        mean = self.mean + (reward - self.mean) / count
        return Spread(count, mean, self.squares + (reward - self.mean) * (reward - mean))

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return sqrt(self.squares / max(1, self.count - 1) / max(1, self.count))


def has_fallen(before: Spread, now: Spread, share: float) -> bool:
    """Whether the mean has fallen by more than this share of it, and more than noise explains."""
    fall = before.mean - now.mean
    return fall > share * abs(before.mean) and fall > NOISE * sqrt(before.error**2 + now.error**2)


class RewardSeries(msgspec.Struct):
    """The last groups of one task, or of all tasks of a source."""

    rewards: list[float] = []
    usual: list[float | None] = []
    """For each of them, the mean reward of earlier groups of the same task. None for a task's first group,
    and in the series of one task."""
    best: Spread | None = None
    """The best mean of as many consecutive groups as are compared, before the last ones."""
    tasks: int = 1
    """How many tasks it has."""

    def add(self, reward: float, groups: int, usual: float | None = None) -> None:
        """Count a group, where `groups` groups are compared with as many."""
        self.rewards.append(reward)
        self.usual.append(usual)
        del self.rewards[: -2 * groups], self.usual[: -2 * groups]
        if len(self.rewards) == 2 * groups:
            before = Spread.of(self.rewards[:groups])
            self.best = before if self.best is None or before.mean > self.best.mean else self.best

    def fall(self, groups: int, share: float) -> tuple[Spread, Spread] | None:
        """The best mean and the present one, if it has fallen from there by more than this share."""
        if self.best is None:
            return None
        now = Spread.of(self.rewards[-groups:])
        fell = has_fallen(self.best, now, share) and not self._other_tasks_explain(groups)
        return (self.best, now) if fell else None

    def _other_tasks_explain(self, groups: int) -> bool:
        """Whether each task does as it did: then the last groups only are of harder tasks."""
        last = zip(self.usual[-groups:], self.rewards[-groups:], strict=True)
        falls = [usual - reward for usual, reward in last if usual is not None]
        if 2 * len(falls) < groups:  # most of the tasks are new
            return False
        fall = Spread.of(falls)
        return fall.mean <= NOISE * fall.error

    def copied(self) -> "RewardSeries":
        return RewardSeries(list(self.rewards), list(self.usual), self.best, self.tasks)


class KeptSeries:
    """So many series by name, those that were used last. One that has a best is not lost to those that have
    none yet, however many they are."""

    def __init__(self, groups: int, kept: Mapping[str, RewardSeries]) -> None:
        self._most = max(FEWEST_KEPT, VALUES_KEPT // (4 * groups))
        self._young: OrderedDict[str, RewardSeries] = OrderedDict()
        self._judged: OrderedDict[str, RewardSeries] = OrderedDict()
        for name, series in kept.items():
            self.put(name, series)

    def __iter__(self) -> Iterator[str]:
        return iter((*self._judged, *self._young))

    def get(self, name: str) -> RewardSeries | None:
        return self._young.get(name) or self._judged.get(name)

    def put(self, name: str, series: RewardSeries) -> None:
        self.forget(name)
        kept = self._young if series.best is None else self._judged
        kept[name] = series
        if len(kept) > self._most:
            kept.popitem(last=False)

    def forget(self, name: str) -> None:
        self._young.pop(name, None)
        self._judged.pop(name, None)

    @property
    def state(self) -> dict[str, RewardSeries]:
        return {name: each.copied() for kept in (self._judged, self._young) for name, each in kept.items()}


TASKS_KEPT = 4096
"""So many tasks are known with their mean reward, those whose groups came last."""
MEMORY = 8
"""What a task's groups usually have is a mean of about so many, so that it follows what the policy learns."""
FEW_TASKS = 8
"""With fewer tasks, a source is not judged as a whole: the series of its tasks are."""
NAMELESS_GROUPS = 32
"""Tasks whose ids name no source have little in common. At least so many groups of them are compared."""
SOURCES_KEPT = 16
"""So many sources are known with their evaluations."""
SESSIONS_KEPT = 256
"""How many evaluation sessions of a version are compared."""
VERSIONS_KEPT = 16


@dataclass(frozen=True)
class Alarm:
    """A guard's reason to set the training back, or to hold it."""

    guard: str
    reason: str
    task_id: str | None = None
    """The task whose rewards have fallen; None if the alarm is about more than one task."""
    source: str | None = None
    """The source of the tasks whose rewards have fallen; None if the alarm is not about rewards, or about
    sessions without a task."""


TaskRewards = Sequence[tuple[str | None, float]]
"""Tasks and rewards of sessions."""


class GroupReward(NamedTuple):
    """The mean reward of a group."""

    task_id: str | None
    reward: float


class EvaluationReward(NamedTuple):
    """The reward of an evaluation session."""

    task_id: str | None
    version: int
    reward: float


class Usual(msgspec.Struct, frozen=True):
    """The rewards that the groups of a task usually have."""

    groups: int = 0
    mean: float = 0.0

    def after(self, reward: float) -> "Usual":
        groups = self.groups + 1
        return Usual(groups, self.mean + (reward - self.mean) / min(groups, MEMORY))


class RewardState(msgspec.Struct, frozen=True):
    """What is known of rewards, as a checkpoint stores it."""

    tasks: dict[str, RewardSeries] = {}
    """By id; the empty one stands for groups without a task."""
    sources: dict[str, RewardSeries] = {}
    known: dict[str, Usual] = {}
    """The tasks whose groups came last."""
    evaluated: dict[str, dict[int, list[tuple[str | None, float]]]] = {}
    """By source and version, the tasks and rewards of the first evaluation sessions, in the order in which
    they ended."""


class RewardGuard:
    """Keeps what was seen of each task. What has raised an alarm is forgotten, so that the same groups do not
    raise a second one."""

    def __init__(self, settings: GuardSettings, state: RewardState) -> None:
        self._groups, self._share = settings.reward_groups, settings.reward_drop
        self._tasks = KeptSeries(self._groups, {name: each.copied() for name, each in state.tasks.items()})
        self._sources = KeptSeries(
            self._groups, {name: each.copied() for name, each in state.sources.items()}
        )
        self._known = OrderedDict(state.known)
        self._evaluated = OrderedDict(
            (source, {version: list(rewards) for version, rewards in versions.items()})
            for source, versions in state.evaluated.items()
        )

    @property
    def state(self) -> RewardState:
        evaluated = {
            source: {version: list(rewards) for version, rewards in versions.items()}
            for source, versions in self._evaluated.items()
        }
        return RewardState(self._tasks.state, self._sources.state, dict(self._known), evaluated)

    def add(self, group: GroupReward) -> Alarm | None:
        """Count a group. Returns the alarm that it raises; None if it raises none."""
        task_id, reward = group
        if task_id is None:
            return self._of_task("", reward, (), "")
        before = self._known.pop(task_id, None)
        self._known[task_id] = (before or Usual()).after(reward)
        if len(self._known) > TASKS_KEPT:
            self._known.popitem(last=False)
        source, alarm = source_of(task_id), None
        if before is not None or self._tasks.get(task_id) is not None:
            first = [before.mean] if before is not None and before.groups == 1 else []
            alarm = self._of_task(task_id, reward, first, source)
        return self._of_source(source, reward, before) or alarm

    def _of_task(self, task_id: str, reward: float, first: Sequence[float], source: str) -> Alarm | None:
        series = self._tasks.get(task_id) or RewardSeries()
        for each in (*(first if not series.rewards else ()), reward):
            series.add(each, self._groups)
        self._tasks.put(task_id, series)
        if self._share is None or (fall := series.fall(self._groups, self._share)) is None:
            return None
        self._tasks.forget(task_id)
        self._sources.forget(source)
        whose = f" of task {task_id}" if task_id else ""
        return _alarm(fall, f"last {self._groups} groups{whose}", task_id or None, source or None)

    def _of_source(self, source: str, reward: float, before: Usual | None) -> Alarm | None:
        groups = self._groups if source else max(self._groups, NAMELESS_GROUPS)
        series = self._sources.get(source) or RewardSeries(tasks=0)
        series.tasks += before is None
        series.add(reward, groups, None if before is None else before.mean)
        self._sources.put(source, series)
        if self._share is None or series.tasks < min(FEW_TASKS, 2 * groups):
            return None
        if (fall := series.fall(groups, self._share)) is None:
            return None
        self._sources.forget(source)
        whose = f"of tasks {source}…" if source else "of tasks without a common name"
        return _alarm(fall, f"last {groups} groups {whose}", None, source)

    def add_evaluations(self, sessions: Sequence[EvaluationReward]) -> Alarm | None:
        """Count evaluation sessions. Returns the first alarm that they raise; None if they raise none."""
        counted = dict.fromkeys(self._count_evaluation(session) for session in sessions)
        alarms = [self._of_evaluations(source) for source in counted]
        return next(filter(None, alarms), None)

    def _count_evaluation(self, session: EvaluationReward) -> str:
        """Returns the source of the session's task."""
        source = "" if session.task_id is None else source_of(session.task_id)
        versions = self._evaluated.setdefault(source, {})
        self._evaluated.move_to_end(source)
        if len(self._evaluated) > SOURCES_KEPT:
            self._evaluated.popitem(last=False)
        kept = versions.setdefault(session.version, [])
        kept += [(session.task_id, session.reward)] if len(kept) < SESSIONS_KEPT else []
        return source

    def _of_evaluations(self, source: str) -> Alarm | None:
        versions = self._evaluated.get(source, {})
        if (reason := self._fallen_evaluation(versions)) is None:
            self._forget_versions(versions)
            return None
        del self._evaluated[source]
        return Alarm("reward_drop", reason, None, source or None)

    def _fallen_evaluation(self, versions: Mapping[int, TaskRewards]) -> str | None:
        """The newest version that has enough evaluation sessions has a far smaller mean reward than an
        earlier one.

        The sessions of one version are no steady stream: those that fail may all end first. So it is compared
        once it has as many sessions as the earlier one, or once a newer version has some."""
        judged = [version for version, rewards in versions.items() if len(rewards) >= self._groups]
        if self._share is None or not judged:
            return None
        newest = max(judged)
        for version in sorted(set(judged) - {newest}):
            if newest == max(versions) and len(versions[newest]) < len(versions[version]):
                continue
            same = self._of_same_tasks(versions[version], versions[newest])
            if same is not None and has_fallen(*same, self._share):
                before, now = same
                return (
                    f"the mean reward of {now.count} evaluation sessions of version {newest} is "
                    f"{now.mean:.3g}, and was {before.mean:.3g} of version {version} (guards.reward_drop)"
                )
        return None

    def _of_same_tasks(self, before: TaskRewards, now: TaskRewards) -> tuple[Spread, Spread] | None:
        """The rewards of the tasks that both versions were evaluated with, as if both had them equally often;
        of all, if they share too few and each had many: then tasks do not repeat. None if they cannot be
        compared."""
        tasks = [{task_id for task_id, _ in rewards} for rewards in (before, now)]
        shared = [[each for each in rewards if each[0] in tasks[0] & tasks[1]] for rewards in (before, now)]
        if min(map(len, shared)) >= self._groups:
            return _weighted(*shared)
        if min(map(len, tasks)) < min(FEW_TASKS, self._groups):
            return None
        return _spread(before), _spread(now)

    def _forget_versions(self, versions: dict[int, list[tuple[str | None, float]]]) -> None:
        """Keep the newest versions, and the best of those with enough sessions."""
        if len(versions) <= VERSIONS_KEPT:
            return
        newest = sorted(versions)[-VERSIONS_KEPT:]
        judged = [version for version, rewards in versions.items() if len(rewards) >= self._groups]
        best = sorted(judged, key=lambda version: fmean(reward for _, reward in versions[version]))[-1:]
        for version in versions.keys() - {*newest, *best}:
            del versions[version]


def _spread(rewards: TaskRewards) -> Spread:
    return Spread.of([reward for _, reward in rewards])


def _weighted(before: TaskRewards, now: TaskRewards) -> tuple[Spread, Spread]:
    """The rewards of the same tasks; those of before as if each task were as frequent as now."""
    each: dict[str | None, Spread] = {}
    for task_id, reward in before:
        each[task_id] = each.get(task_id, Spread()).plus(reward)
    mean = fmean(each[task_id].mean for task_id, _ in now)
    return msgspec.structs.replace(_spread(before), mean=mean), _spread(now)


def _alarm(fall: tuple[Spread, Spread], whose: str, task_id: str | None, source: str | None) -> Alarm:
    best, now = fall
    reason = f"the mean reward of the {whose} is {now.mean:.3g}, and was {best.mean:.3g} at best "
    return Alarm("reward_drop", f"{reason}(guards.reward_drop)", task_id, source)
