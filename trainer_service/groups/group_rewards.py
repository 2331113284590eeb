"""Collects the rewards of complete groups for the guards, and scores each version by the rewards of the
sessions that it sampled, task by task."""

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from math import sqrt
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from trainer_service.groups.assemble import Group
from trainer_service.groups.evaluation import Evaluation, sampled_by
from trainer_service.groups.reward_guard import EvaluationReward, GroupReward, Spread, source_of

STANDARD_ERRORS = 2.0
"""This many standard errors are subtracted from a version's mean reward, so that a few lucky sessions do not
make it the best."""
TASKS_APART = 8
"""The first so many tasks of a source are scored apart, all further ones together."""
SOURCES_KEPT = 64
"""So many sources are remembered, those whose sessions ended last."""

Kind = Literal["training", "evaluation"]
"""Training and evaluation sessions may have tasks of unequal difficulty."""
KINDS: tuple[Kind, ...] = ("training", "evaluation")


class VersionScore(NamedTuple):
    """The rewards of one version."""

    version: int
    sessions: int
    reward: float
    """The mean reward of its sessions."""


class ScoreState(msgspec.Struct, frozen=True):
    """`VersionScores`, as a checkpoint stores them. Their keys are a kind, and after a blank the unit, if it
    has a task."""

    versions: dict[int, dict[str, Spread]] = {}
    overall: dict[str, Spread] = {}
    """Over the rewards of all versions."""
    sources: dict[str, list[str]] = {}
    """The tasks of each source that are scored apart."""


class VersionScores:
    """Two versions are compared by the tasks that both have sampled; if they share none, the newer one counts
    as better. A version that sampled nothing is never the best."""

    def __init__(self) -> None:
        self.resume(ScoreState())

    def resume(self, state: ScoreState) -> None:
        """Continue with the scores that a checkpoint stored."""
        self._known = {version: dict(units) for version, units in state.versions.items()}
        self._overall = dict(state.overall)
        self._sources = OrderedDict((source, list(tasks)) for source, tasks in state.sources.items())

    @property
    def state(self) -> ScoreState:
        versions = {version: dict(each) for version, each in self._known.items()}
        sources = {source: list(tasks) for source, tasks in self._sources.items()}
        return ScoreState(versions, dict(self._overall), sources)

    def add(self, version: int, reward: float, kind: Kind = "training", task_id: str | None = None) -> None:
        key = _key(kind, self._unit_of(task_id))
        scores = self._known.setdefault(version, {})
        scores[key] = scores.get(key, Spread()).plus(reward)
        self._overall[key] = self._overall.get(key, Spread()).plus(reward)

    def knows(self, version: int) -> bool:
        return version in self._known

    @property
    def last_sources(self) -> Sequence[str]:
        """The sources of the sessions that ended last, the newest last."""
        return list(self._sources)

    def best(
        self, among: Collection[int], task_id: str | None = None, source: str | None = None
    ) -> VersionScore | None:
        """The best version for a task, for all tasks of a source, or for all tasks. If this is known to be a
        poor one, another one that has not met these tasks is better. None if none has a session."""
        about = self._about(task_id, source)
        found = self._best(among, about)
        if about is None or (found is not None and not self._is_poor(found, about)):
            return self._scored(found, about)
        others = [version for version in among if not self._units(version, about)]
        other = self._best(others, None)
        return self._scored(found, about) if other is None else self._scored(other, None)

    def keep(self, versions: Collection[int]) -> None:
        """Forget all other versions."""
        self._known = {version: each for version, each in self._known.items() if version in versions}

    def _unit_of(self, task_id: str | None) -> str:
        """The unit in which sessions of this task count."""
        if task_id is None:
            return ""
        tasks = self._sources.setdefault(source := source_of(task_id), [])
        self._sources.move_to_end(source)
        if len(self._sources) > SOURCES_KEPT:
            self._forget(*self._sources.popitem(last=False))
        if task_id not in tasks and len(tasks) < TASKS_APART:
            tasks.append(task_id)
        return task_id if task_id in tasks else _rest_of(source)

    def _forget(self, source: str, tasks: Sequence[str]) -> None:
        gone = {_key(kind, unit) for unit in (*tasks, _rest_of(source)) for kind in KINDS}
        for scores in (self._overall, *self._known.values()):
            for key in gone & scores.keys():
                del scores[key]
        self._known = {version: scores for version, scores in self._known.items() if scores}

    def _about(self, task_id: str | None, source: str | None) -> set[str] | None:
        """The units of a task, or of all tasks of a source; None stands for all units."""
        if task_id is not None:
            apart = task_id in self._sources.get(source := source_of(task_id), ())
            return {task_id if apart else _rest_of(source)}
        return None if source is None else {*self._sources.get(source, ()), _rest_of(source)}

    def _units(self, version: int, about: set[str] | None) -> set[str]:
        units = {_unit_in(key) for key in self._known[version]} if version in self._known else set()
        return units if about is None else units & about

    def _best(self, among: Collection[int], about: set[str] | None) -> int | None:
        found: int | None = None
        for version in sorted(among, reverse=True):
            units = self._units(version, about)
            if not units:
                continue
            shared = units if found is None else units & self._units(found, about)
            if found is None or (shared and self._worth(version, shared) > self._worth(found, shared)):
                found = version
        return found

    def _worth(self, version: int, units: set[str]) -> float:
        """By how much its sessions are better than all sessions of their kind and task, at least."""
        advantage, error = self._compared(version, units)
        return advantage - STANDARD_ERRORS * error

    def _is_poor(self, version: int, units: set[str]) -> bool:
        advantage, error = self._compared(version, self._units(version, units))
        return advantage + STANDARD_ERRORS * error < 0

    def _compared(self, version: int, units: set[str]) -> tuple[float, float]:
        """The mean difference of its rewards from the mean reward of their kind and task, and its standard
        error."""
        scores = {key: each for key, each in self._known[version].items() if _unit_in(key) in units}
        sessions = sum(each.count for each in scores.values())
        total = sum(each.count * (each.mean - self._overall[key].mean) for key, each in scores.items())
        overall = [each for key, each in self._overall.items() if _unit_in(key) in units]
        spread = sqrt(sum(each.squares for each in overall) / sum(each.count for each in overall))
        return total / sessions, spread / sqrt(sessions)

    def _scored(self, version: int | None, about: set[str] | None) -> VersionScore | None:
        if version is None:
            return None
        units = self._units(version, about)
        scores = [each for key, each in self._known[version].items() if _unit_in(key) in units]
        sessions = sum(each.count for each in scores)
        return VersionScore(version, sessions, sum(each.count * each.mean for each in scores) / sessions)


def _key(kind: Kind, unit: str) -> str:
    return f"{kind} {unit}" if unit else kind


def _unit_in(key: str) -> str:
    return key.partition(" ")[2]


def _rest_of(source: str) -> str:
    """The unit of all tasks of a source that are not scored apart. No id of a task has an asterisk."""
    return f"{source}*"


LARGEST = 1e30
"""A larger reward counts as this, so that no sum of rewards or of their squares overflows."""
KEPT = 4096
"""The guards get at most so many means, the newest: while the training is paused, they ask for none."""


class GroupRewards:
    """Counts each group once, when it is complete. It may wait for its step for many polls."""

    def __init__(self) -> None:
        self._counted: set[str] = set()
        self._means = deque[GroupReward](maxlen=KEPT)
        self._evaluations = deque[EvaluationReward](maxlen=KEPT)
        self.by_version = VersionScores()
        self.compared = self.different = 0
        """The groups of this process with two rewards or more, and those whose rewards differ."""

    @property
    def counted(self) -> list[str]:
        """Ids of the groups that are counted and have not ended. A restart reads their entries again."""
        return sorted(self._counted)

    def resume(self, scores: ScoreState, counted: Collection[str]) -> None:
        self.by_version.resume(scores)
        self._counted = set(counted)

    def add(self, group: Group) -> None:
        """Count the rewards of a group's rollouts, and those of evaluation sessions apart."""
        if group.group_id in self._counted:
            return
        self._counted.add(group.group_id)
        rewards = []
        for member in group.rollouts:
            if member.evaluation is None and member.reward is not None:
                rewards.append(_bounded(member.reward))
                if (version := sampled_by(member.turns)) is not None:
                    self.by_version.add(version, rewards[-1], task_id=group.task_id)
        if rewards:
            self._means.append(GroupReward(group.task_id, fmean(rewards)))
        self.compared += len(rewards) > 1
        self.different += len(set(rewards)) > 1
        for member in group.members:
            if member.evaluation is not None:
                self._add_evaluation(member.evaluation, member.task_id)

    def _add_evaluation(self, evaluation: Evaluation, task_id: str | None) -> None:
        if not evaluation.failed and evaluation.reward is not None and evaluation.version is not None:
            reward = _bounded(evaluation.reward)
            self._evaluations.append(EvaluationReward(task_id, evaluation.version, reward))
            self.by_version.add(evaluation.version, reward, "evaluation", task_id)

    def keep(self, group_ids: Collection[str]) -> None:
        """Forget all counted groups except these: the other groups have ended."""
        self._counted.intersection_update(group_ids)

    def take(self) -> tuple[list[GroupReward], list[EvaluationReward]]:
        """What was counted since the last call: the task and mean reward of each group, and the task, version
        and reward of each evaluation session."""
        found = list(self._means), list(self._evaluations)
        self._means.clear()
        self._evaluations.clear()
        return found


def _bounded(reward: float) -> float:
    return min(max(reward, -LARGEST), LARGEST)
