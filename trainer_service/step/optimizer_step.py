"""One batch through the policy: look, forward, loss, backward, step; and what it said of itself.

rows ─ micro_batches ─ share ─▶ look? ─ survey ─▶ logprobs ─ policy_loss ─ backward ─▶ … ─▶ step
  └────────────────────── accumulate: once, or for groups as they come ────────────────┘
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from trainer_service.algorithms.aggregation import StepCounts, divisor
from trainer_service.algorithms.critic import value_loss
from trainer_service.algorithms.policy_loss import policy_loss
from trainer_service.algorithms.prox import loglinear
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.algorithms.tokens import Tokens
from trainer_service.rows.rows import MicroBatch, Row, micro_batches
from trainer_service.step.diagnostics import Criticised, Observed, diagnostics, of_critic
from trainer_service.step.pre_pass import Look, Seer, Survey, Valuer, look, survey
from trainer_service.step.step_request import StepRequest

logger = logging.getLogger(__name__)


class Student(Valuer, Protocol):
    """What `optimise` needs of a critic."""

    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> float: ...


class Learner(Seer, Protocol):
    """What `optimise` needs of a policy: one rank's, of perhaps several."""

    @property
    def critic(self) -> Student: ...

    def share(self, batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]: ...

    def backward(self, loss: Tensor) -> None: ...

    def step(self, scale: float = 1.0) -> float: ...

    def forget(self, batch: MicroBatch) -> None: ...


class Optimisation:
    """The optimizer steps of one rank. A step may learn from some of its groups before it has them all: their
    gradients add up in the learner, and what they say of themselves adds up here.

    Every rank makes the same calls with the same rows, and takes its share of their micro-batches; the loss
    is that of all of them, whatever their number, and however a step was parted.
    """

    def __init__(self, learner: Learner, value_clip: float | None = None) -> None:
        self._learner, self._value_clip = learner, value_clip
        self._rows: list[Row] = []
        """Of the step in the making."""
        self._parts: list[_Part] = []

    def accumulate(self, request: StepRequest) -> None:
        """Learn from the rows of whole groups; the weights stay."""
        learner, rows, algorithm = self._learner, request.rows, request.algorithm
        share = learner.share(list(micro_batches(rows, algorithm.max_tokens)))
        looks = []
        for batch, _ in share:
            looks.append(look(learner, batch, request.version, algorithm))
            request.beat()
        known = survey(learner, share, looks, algorithm)
        part = _Part(share, looks, known, counts_of(rows), len(self._rows))
        self._rows += rows
        self._parts.append(part)
        part.seen = self._learn(part, request)

    def step(self, request: StepRequest) -> dict[str, float]:
        """Learn from the rest of the step's rows, and make the step. All ranks return its metrics.

        Ends at a gradient that is not finite, with its norm and how many epochs have changed the weights
        before. Either way the next step begins with nothing.
        """
        if request.rows:
            self.accumulate(request)
        try:
            return self._step(request)
        finally:
            self._rows, self._parts = [], []

    def forget(self) -> None:
        """Drop what was accumulated; nothing where nothing was."""
        if self._parts:
            self._learner.forget(self._parts[0].share[0][0])
        self._rows, self._parts = [], []

    def _step(self, request: StepRequest) -> dict[str, float]:
        learner, algorithm, counts = self._learner, request.algorithm, counts_of(self._rows)
        # Gradients came in as if the first part were all of the step.
        of_step, of_first = (divisor(each, algorithm.aggregation) for each in (counts, self._parts[0].counts))
        metrics: dict[str, float] = {}
        for epoch in range(algorithm.epochs):
            if epoch:
                for part in self._parts:
                    part.seen = self._learn(part, request)
            grad_norm = learner.step(of_first / of_step)
            if not math.isfinite(grad_norm):  # DeepSpeed has left the weights as they were, on every rank
                return {"grad_norm": grad_norm, "epochs": epoch}
            seen = [each.cpu() for part in self._parts for each in part.of_step(of_step, algorithm)]
            step = Observed.joined(learner.everybody(seen))
            said = diagnostics(step, request.version)
            if epoch == 0:
                self._name_left_out(step)
                metrics = {**said, "grad_norm": grad_norm}
            else:  # what clips does so in the later epochs
                metrics |= {name: value for name, value in said.items() if name.startswith("ppo/")}
        if algorithm.needs_critic:
            (part,) = self._parts  # returns are of the whole step
            metrics |= _criticised(learner, part, counts.tokens, self._value_clip, request.beat)
        return metrics

    def _name_left_out(self, step: Observed) -> None:
        """A token whose log-probability is none is in no loss: whose they are is said."""
        if not bool(step.finite_T.all()):
            rows = set(step.rows_T[~step.finite_T].tolist())
            names = sorted({self._rows[row].session_id for row in rows})
            logger.warning("tokens without a finite log-probability are left out, of sessions %s", names)

    def _learn(self, part: "_Part", request: StepRequest) -> list[Observed]:
        learner, algorithm, seen = self._learner, request.algorithm, []
        weight = part.divisor(algorithm) / self._parts[0].divisor(algorithm)
        for (batch, is_ours), before, advantages_T in zip(
            part.share, part.looks, part.known.advantages, strict=True
        ):
            lp_new_T, entropy_T = learner.logprobs(batch)
            tokens = _tokens(learner, batch, before, lp_new_T, advantages_T, entropy_T, request)
            losses = policy_loss(tokens, algorithm, part.counts, part.known.statistics)
            learner.backward((weight if is_ours else 0.0) * losses.loss)
            if is_ours:
                versions_T = learner.tensor(batch.versions_T)
                lp_begin_T = lp_new_T.detach() if before.lp_prox_T is None else before.lp_prox_T
                seen.append(
                    Observed.of(
                        tokens, losses, lp_begin_T=lp_begin_T, entropy_T=entropy_T, versions_T=versions_T
                    )
                )
            request.beat()
        return seen


@dataclass
class _Part:
    """Some whole groups of a step, as one rank has them."""

    share: Sequence[tuple[MicroBatch, bool]]
    looks: Sequence[Look]
    known: Survey
    counts: StepCounts
    rows_before: int
    """Of the step, in the parts before it."""
    seen: Sequence[Observed] = ()
    """What its micro-batches said in the last pass that learned."""

    def divisor(self, algorithm: AlgorithmSettings) -> int:
        return divisor(self.counts, algorithm.aggregation)

    def of_step(self, whole: int, algorithm: AlgorithmSettings) -> list[Observed]:
        """The same, with rows and weights as they are in the step, which divides by `whole`."""
        share = self.divisor(algorithm) / whole
        return [
            replace(each, rows_T=each.rows_T + self.rows_before, aggregation_T=each.aggregation_T * share)
            for each in self.seen
        ]


def _criticised(
    learner: Learner,
    part: _Part,
    tokens_in_step: int,
    value_clip: float | None,
    beat: Callable[[], None],
) -> dict[str, float]:
    """The critic's step, once the policy has made its own."""
    seen = []
    for (batch, is_ours), before, returns_T in zip(part.share, part.looks, part.known.returns, strict=True):
        assert before.values_T is not None  # noqa: S101 - `needs_critic`
        values_T = learner.critic.values(batch)
        found = value_loss(
            values_T, before.values_T, returns_T, tokens_in_step=tokens_in_step, clip=value_clip
        )
        learner.critic.backward(found.loss if is_ours else 0.0 * found.loss)
        if is_ours:
            seen.append(Criticised(before.values_T, returns_T, found.per_token_T, found.clipped_T).cpu())
        beat()
    grad_norm = learner.critic.step()
    if not math.isfinite(grad_norm):
        logger.warning("the critic makes no step: the norm of its gradient is %s", grad_norm)
    return {**of_critic(Criticised.joined(learner.everybody(seen))), "critic/grad_norm": grad_norm}


def counts_of(rows: Sequence[Row]) -> StepCounts:
    """Of the rows of a step, or of a part of it. Forks of a session share its rollout."""
    return StepCounts(
        tokens_R=torch.tensor([row.trained_tokens for row in rows]),
        rollout_R=_numbered([row.session_id for row in rows]),
        group_R=_numbered([row.group_id for row in rows]),
    )


def _tokens(
    learner: Learner,
    batch: MicroBatch,
    before: Look,
    lp_new_T: Tensor,
    advantages_T: Tensor,
    entropy_T: Tensor,
    request: StepRequest,
) -> Tokens:
    lp_roll_T = learner.tensor(batch.logprobs_T)
    lp_prox_T = before.lp_prox_T
    if request.algorithm.prox == "loglinear":
        versions_T = learner.tensor(batch.versions_T)
        lp_prox_T = loglinear(lp_new_T, lp_roll_T, versions_T, version=request.version + 1)
    return Tokens(
        lp_new_T=lp_new_T,
        lp_prox_T=lp_new_T.detach() if lp_prox_T is None else lp_prox_T,
        lp_roll_T=lp_roll_T,
        advantages_T=advantages_T,
        rows_T=learner.tensor(batch.rows_T),
        lp_ref_T=before.lp_ref_T,
        lp_teacher_T=None if batch.teacher_T is None else learner.tensor(batch.teacher_T),
        entropy_T=entropy_T if request.algorithm.entropy_bonus else None,
        fresh_T=before.fresh_T,
    )


def _numbered(names: Sequence[str]) -> Tensor:
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names], dtype=torch.int64)
