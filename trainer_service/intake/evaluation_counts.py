"""Counts evaluation sessions, which are never trained, and reports the scores of their versions."""

from collections.abc import Iterable

from trainer_service.groups.assemble import Group
from trainer_service.groups.evaluation import Evaluations, EvaluationState
from trainer_service.metrics import TrainerMetrics
from trainer_service.status.heartbeat import Heartbeat


class EvaluationCounts:
    """Keeps the scores, and reports them to Prometheus, the sinks and `/status`."""

    def __init__(self, heartbeat: Heartbeat, metrics: TrainerMetrics) -> None:
        self._heartbeat, self._metrics = heartbeat, metrics
        self._evaluations = Evaluations()

    def state(self) -> EvaluationState:
        return self._evaluations.state

    def resume(self, state: EvaluationState) -> None:
        self._evaluations = Evaluations(state)
        self._metrics.show_evaluations(state.scores)
        self._heartbeat.note_evaluations(self._evaluations.metrics())

    def note_version(self, version: int, step: int) -> None:
        """Note that `step` made `version`."""
        self._evaluations.note_version(version, step)

    def add(self, groups: Iterable[Group]) -> None:
        """Count the evaluation sessions of groups that have ended."""
        members = (member for group in groups for member in group.members)
        changed = self._evaluations.add(each.evaluation for each in members if each.evaluation)
        for score in changed:
            self._metrics.evaluated(score, self._evaluations.step_of(score.version))
        if changed:
            self._metrics.forget_evaluations(self._evaluations.forget_oldest())
            self._heartbeat.note_evaluations(self._evaluations.metrics())
