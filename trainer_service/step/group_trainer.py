"""Trains the policy on groups: advantages, the teacher's scores, early groups, and the optimizer step.

groups ─ early_pass ─▶ gradients of the groups that are here, while the step waits for more
groups ─ ask_teacher ─▶ ScoredRows ─ step ─▶ new weights, the step's metrics, and what its span says
"""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from rollout_queue.contract.records import Verdict
from rollout_queue.tracing import Value, span
from trainer_service.algorithms.kl import adapted_coefficient
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.screening import (
    Baselines,
    ScreenedGroup,
    updated_baselines,
    with_advantages,
    with_verdict,
    without_sessions,
)
from trainer_service.heartbeat import Heartbeat
from trainer_service.rows.packing import packs_of
from trainer_service.rows.row_images import ShownRows
from trainer_service.rows.rows import Row
from trainer_service.settings import RecordedTokens
from trainer_service.step.quarantine import non_finite_groups
from trainer_service.step.ranks import DistributedPolicy
from trainer_service.step.step_attempts import OutOfMemory, StepAttempts, first_too_long
from trainer_service.step.step_parts import StepRequest
from trainer_service.step.teacher import TeacherClient, TeacherUnavailable
from trainer_service.storage.run_state import RunState

logger = logging.getLogger(__name__)

SHOWN = ("loss", "grad_norm", "entropy", "mismatch/abs_logp", "mismatch/kl")
"""The metrics that are attributes."""


def traces_of(groups: Sequence[ScreenedGroup]) -> Iterator[str]:
    """The spans that recorded the turns which these groups train, as far as they are traced."""
    for group in groups:
        for planned in group.planned:
            for turn in planned.branch:
                if turn.trace is not None and turn.turn_id in planned.turn_ids:
                    yield turn.trace


def step_attributes(
    groups: Sequence[ScreenedGroup], rows: Sequence[Row], version: int, values: object
) -> dict[str, Value | None]:
    """`values` are the step's metrics, if it was made. The rewards are those of the sessions in `groups`."""
    members = [member for screened in groups for member in screened.group.members]
    rewards = [member.reward for member in members if member.rewarded and member.reward is not None]
    metrics = values if isinstance(values, dict) else {}
    shown = {f"rl.{name.replace('/', '.')}": metrics.get(name) for name in SHOWN}
    return {
        "rl.policy.version": version,
        "rl.step.made": isinstance(values, dict),
        "rl.step.rows": len(rows),
        "rl.step.turns": sum(len(row.turn_ids) for row in rows),
        "rl.step.tokens": sum(row.trained_tokens for row in rows),
        "rl.reward_mean": sum(rewards) / len(rewards) if rewards else None,
        **shown,
    }


Fingerprint = tuple[Any, ...]
"""The rewards and the turns that a group is trained on. Equal fingerprints give equal gradients."""


class EarlyGroups:
    """The groups whose gradients are accumulated for the next step.

    The gradients are not durable: after a crash, the stream delivers their groups again.
    """

    def __init__(self, policy: DistributedPolicy) -> None:
        self._policy = policy
        self._learned: dict[Fingerprint, str] = {}
        """The group id of each fingerprint that is in the accumulated gradient."""
        self._is_over = False
        """Whether a group changed after its gradient was accumulated, or a pass did not fit into the memory.
        If so, `fills_a_pass` is false until the next step."""
        self.tokens = 0
        """Trained tokens in the accumulated gradient."""

    @property
    def group_ids(self) -> Collection[str]:
        """The groups from which the policy has learned, and which no step contains yet."""
        return self._learned.values()

    def drop_if_changed(self, groups: Sequence[ScreenedGroup]) -> None:
        """Discard the accumulated gradient if one of its groups has other rewards or turns now, or is gone.

        `groups` are all groups that can be trained now.
        """
        if not self._learned.keys() <= {_fingerprint(judged) for judged in groups}:
            self._policy.discard_gradients()
            self._learned, self._is_over, self.tokens = {}, True, 0

    def discard(self) -> None:
        """Discard the accumulated gradient: the weights become others."""
        if self._learned:
            self._policy.discard_gradients()
        self._learned, self._is_over, self.tokens = {}, False, 0

    def remaining(self, groups: Sequence[ScreenedGroup]) -> list[ScreenedGroup]:
        """The groups that are not in the accumulated gradient."""
        return [judged for judged in groups if _fingerprint(judged) not in self._learned]

    def fills_a_pass(self, groups: Sequence[ScreenedGroup], algorithm: AlgorithmSettings) -> bool:
        """Whether the rows of these groups make a pass: as many micro-batches as the ranks compute at a time,
        and at least `max_tokens` tokens for each, where each shared prefix counts once."""
        planned = [row for judged in groups for row in judged.planned]
        ranks = self._policy.data_ranks
        fewest = ranks * algorithm.micro_batch_tokens
        if self._is_over or sum(len(row) for row in planned) < fewest:
            return False
        ids = [row.row().ids_L for row in planned]
        packs = packs_of(ids, algorithm.micro_batch_tokens, self._policy.shares_prefixes)
        return len(packs) >= ranks and sum(tree.tokens for pack in packs for tree in pack) >= fewest

    def learn(self, groups: Sequence[ScreenedGroup], request: StepRequest) -> None:
        """Add the gradient of `groups`. The request holds their rows, with advantages. After OutOfMemory,
        nothing is learned early for this step."""
        try:
            self._policy.accumulate(request)
        except OutOfMemory:
            self._learned, self._is_over, self.tokens = {}, True, 0
            raise
        self._learned |= {_fingerprint(judged): judged.group.group_id for judged in groups}
        self.tokens += sum(row.trained_tokens for row in request.rows)

    def step(self, groups: Sequence[ScreenedGroup], request: StepRequest) -> dict[str, float]:
        """Add the gradients of the remaining groups and make the step. The request holds the rows of all
        `groups`. Returns the step's metrics by name."""
        self.drop_if_changed(groups)
        remaining = {row.session_id for judged in self.remaining(groups) for row in judged.planned}
        early = self.tokens / sum(row.trained_tokens for row in request.rows)
        self._learned, self._is_over, self.tokens = {}, False, 0
        others = [row for row in request.rows if row.session_id in remaining]
        return self._policy.optimise(request.with_rows(others)) | {"early_frac": early}


def _fingerprint(judged: ScreenedGroup) -> Fingerprint:
    rollouts = tuple(
        (rollout.rollout_id, rollout.reward, *sorted(rollout.parts.items())) for rollout in judged.rollouts
    )
    return (rollouts, tuple(row.turn_ids for row in judged.planned))


class Diverged(Exception):
    """The weights cannot be used: they are not finite, or an earlier update of a failed step changed
    them.
    Nothing of the step was saved, and a restart loads the last checkpoint."""


class NotFinite(NamedTuple):
    """The gradient of a step is not finite, and the step was not made."""

    refused: list[ScreenedGroup]
    """The groups whose gradient is not finite, each with its verdict. If the search finds none, all groups of
    the step."""
    diverged: str | None
    """Why the weights cannot be used any more: an earlier update of the step has changed them. None if they
    are unchanged."""


class ScoredRows(NamedTuple):
    """The rows of a step, with the log-probabilities of the teacher if the algorithm has one."""

    groups: list[ScreenedGroup]
    rows: list[Row]
    """All rows of `groups`, with their advantages."""
    refused: list[ScreenedGroup]
    """Groups that cannot be trained, because the teacher refuses all of their sessions."""


class GroupTrainer:
    """Owns the early groups of the next step, the running mean rewards of agents, and the coefficient of the
    KL penalty."""

    def __init__(
        self,
        policy: DistributedPolicy,
        algorithm: AlgorithmSettings,
        heartbeat: Heartbeat,
        attempts: StepAttempts,
        teacher: TeacherClient | None,
        images: Callable[[Sequence[Row]], ShownRows[Row]],
        recorded: RecordedTokens = "none",
    ) -> None:
        """`images` gives rows the bytes of their images. `recorded` is what steps record of each token."""
        self._policy, self._algorithm, self._heartbeat = policy, algorithm, heartbeat
        self._recorded = recorded
        self._attempts = attempts
        self.early = EarlyGroups(policy)
        self._teacher, self._images = teacher, images
        self.baselines: Baselines = {}
        self._kl_coefficient = algorithm.kl.coefficient
        self._steps = 0
        self.trace: str | None = None
        """The span of the last step; None if it was not traced."""

    def resume(self, state: RunState) -> None:
        """Continue with what a checkpoint stored, and count the end of the last process."""
        self._attempts.resume()
        self.baselines, self._steps = state.baselines, state.step
        if self._algorithm.kl.target is not None and state.kl_coefficient is not None:
            self._kl_coefficient = state.kl_coefficient

    def stored_in(self, state: RunState) -> RunState:
        """The state of a checkpoint, with what this trainer needs after a restart."""
        adapted = None if self._algorithm.kl.target is None else self._kl_coefficient
        return replace(state, baselines=dict(self.baselines), kl_coefficient=adapted)

    @property
    def records(self) -> Mapping[tuple[str, str], bytes]:
        """The packed `TrainedTokens` of the last step's turns, by session id and turn id, if they are
        recorded."""
        found = () if self._recorded == "none" else self._policy.records
        return {(each.session_id, each.turn_id): each.packed for each in found}

    def early_pass(
        self, groups: Sequence[ScreenedGroup], version: int, algorithm: AlgorithmSettings
    ) -> Callable[[], None] | None:
        """A function that makes a pass over the groups that the policy has not learned from yet. None if the
        algorithm does not learn early, or if these groups do not fill a pass on every rank. If the pass does
        not fit into the memory, nothing is learned early, and the next passes are smaller."""
        if not algorithm.learns_early:
            return None
        self.early.drop_if_changed(groups)
        remaining = self.early.remaining(groups)
        if not self.early.fills_a_pass(remaining, algorithm):
            return None
        shown = self._images(self._rows(remaining))
        if shown.refused:
            return None  # `ask_teacher` ends them
        request = self._request(shown.rows, version, algorithm)

        def learn() -> None:
            with self._attempts.noted(groups):
                try:
                    self.early.learn(remaining, request)
                except OutOfMemory as error:
                    self._ease(request, error)

        return learn

    def ask_teacher(self, groups: list[ScreenedGroup]) -> ScoredRows:
        """The rows of a step, with the teacher's scores if there is a teacher. A session that the teacher
        refuses, or whose images are gone, ends; its group is trained without it. Waits until the teacher
        answers; raises Stopped if the trainer is told to stop meanwhile."""
        shown, teacher = self._images(self._rows(groups)), self._teacher
        left, ended = _parted(groups, shown.refused, "the store")
        if teacher is None or not shown.rows:
            return ScoredRows(left, shown.rows, ended)
        found = self._heartbeat.retry(
            lambda: teacher.score(shown.rows), TeacherUnavailable, "waiting", "the teacher to score the rows"
        )
        left, refused = _parted(left, found.refused, "the teacher")
        return ScoredRows(left, found.rows, [*ended, *refused])

    def gradient_is_finite(
        self, groups: Sequence[ScreenedGroup], version: int, algorithm: AlgorithmSettings
    ) -> bool:
        """Compute the gradient of these groups alone. Changes nothing."""
        rows = self._images(self._rows(groups)).rows
        return not rows or self._policy.gradient_is_finite(self._request(rows, version, algorithm))

    def step(
        self, scored: ScoredRows, version: int, algorithm: AlgorithmSettings
    ) -> dict[str, float] | NotFinite | None:
        """Make one optimizer step from the weights of `version`. Returns its metrics. Returns None if it does
        not fit into the memory; then the next one is smaller, and the groups wait for it. Raises
        Diverged if the weights were not finite before the step."""
        with span("rl.step", root=True, links=traces_of(scored.groups)) as traced:
            self.trace = traced.traceparent
            values = self._step(scored, version, algorithm)
            if traced.recording:
                traced.set(step_attributes(scored.groups, scored.rows, version, values))
            return values

    def _step(
        self, scored: ScoredRows, version: int, algorithm: AlgorithmSettings
    ) -> dict[str, float] | NotFinite | None:
        request = self._request(scored.rows, version, algorithm)
        with self._attempts.noted(scored.groups):
            try:
                values = self.early.step(scored.groups, request)
            except OutOfMemory as error:
                self._ease(request, error)
                return None
            if not math.isfinite(values["grad_norm"]):
                return self._not_finite(scored.groups, request, values)
        self._attempts.note_trained(max(map(len, scored.rows)))
        rollouts = [rollout for screened in scored.groups for rollout in screened.rollouts]
        self.baselines = updated_baselines(rollouts, self._algorithm, self.baselines)
        values = values | {
            "kl/coefficient": self._kl_coefficient,
            "micro_batch_tokens": algorithm.micro_batch_tokens,
        }
        self._after_step(values, len(rollouts))
        return values

    def _after_step(self, values: Mapping[str, float], rollouts: int) -> None:
        """Adapt the coefficient of the KL, and move its reference, if that is due."""
        kl = self._algorithm.kl
        self._steps += 1
        if kl.target is not None:
            measured = values["kl/reference"]
            self._kl_coefficient = adapted_coefficient(
                self._kl_coefficient, measured, target=kl.target, horizon=kl.horizon, rollouts=rollouts
            )
        if kl.reference_every_steps and self._steps % kl.reference_every_steps == 0:
            self._policy.move_reference()

    def _ease(self, request: StepRequest, error: OutOfMemory) -> None:
        """Find out why a pass did not fit. If it had one row, look for the rows that are too long, by
        bisection. Raises Stopped, and OutOfMemory if each row fits alone."""
        logger.warning("a pass does not fit into the memory: %s", error)
        rows, most = request.rows, request.algorithm.micro_batch_tokens
        if most > max(map(len, rows)):
            self._attempts.halve()
            return

        def fits(row: Row) -> bool:
            return self._fits(request.with_rows([row]))

        too_long = first_too_long(rows, fits)
        if too_long is None:
            raise OutOfMemory("each row fits alone, and all together do not")
        tries = self._attempts.tries(len(too_long))
        if self._heartbeat.becomes(lambda: fits(too_long), tries, "training", "memory, which others may use"):
            logger.warning("there is enough memory again")
        else:
            self._attempts.bound_rows(len(too_long) - 1)

    def _fits(self, request: StepRequest) -> bool:
        try:
            self._policy.accumulate(request)
            self._policy.accumulate(request)  # beside a gradient, as most passes of a step are
        except OutOfMemory:
            return False
        self._policy.discard_gradients()
        return True

    def _not_finite(
        self, groups: Sequence[ScreenedGroup], request: StepRequest, values: Mapping[str, float]
    ) -> NotFinite:
        """Finds the groups whose gradient is not finite, so that no restart trains them again."""
        usable, version = self._policy.weights_are_finite(), request.version
        if not usable and not values["updates"]:
            raise Diverged(f"version {version}: the weights are not finite")

        is_finite = partial(self.gradient_is_finite, version=version, algorithm=request.algorithm)
        found = non_finite_groups(groups, is_finite) if usable else []
        gradient = "its gradient" if found else f"the gradient of its batch of {len(groups)} groups"
        verdict = Verdict(code="invalid", detail=f"{gradient} is not finite at version {version}")
        diverged = None
        if values["updates"]:
            diverged = f"update {values['updates'] + 1:g}: the gradient's norm is {values['grad_norm']}"
        return NotFinite([with_verdict(each, verdict) for each in found or groups], diverged)

    def _rows(self, groups: Sequence[ScreenedGroup]) -> list[Row]:
        rows = [row for screened in groups for row in screened.rows]
        rollouts = [rollout for screened in groups for rollout in screened.rollouts]
        return with_advantages(rows, rollouts, self._algorithm, self.baselines)

    def _request(self, rows: Sequence[Row], version: int, algorithm: AlgorithmSettings) -> StepRequest:
        algorithm = algorithm.with_kl_coefficient(self._kl_coefficient)
        beat = partial(self._heartbeat.beat, "training")
        return StepRequest(rows, version, algorithm, beat, self._recorded)


def _parted(
    groups: Sequence[ScreenedGroup], refused: Mapping[str, str], by: str
) -> tuple[list[ScreenedGroup], list[ScreenedGroup]]:
    """The groups without the refused sessions, and those that have none left."""
    if not refused:
        return list(groups), []
    parted = [without_sessions(screened, refused, by) for screened in groups]
    ended = [screened for screened in parted if screened.skip_reason]
    return [screened for screened in parted if not screened.skip_reason], ended
