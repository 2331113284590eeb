"""Makes one rank's optimizer steps: pre-pass, forward, loss, backward, step, and the step's metrics.

rows ─ micro_batches ─ own share ─▶ pre_pass ─ step_context ─▶ logprobs ─ policy_loss ─ backward ─▶ … ─▶ step
  └──────────────── accumulate: once for all rows, or for groups as they arrive ────────────────┘
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
from trainer_service.algorithms.sums import Sums
from trainer_service.algorithms.tokens import Tokens
from trainer_service.rows.rows import MicroBatch, Row, micro_batches
from trainer_service.step.diagnostics import (
    SampledTokens,
    critic_metrics,
    critic_sums,
    diagnostics,
    token_sums,
)
from trainer_service.step.pre_pass import (
    PrePass,
    PrePassCritic,
    PrePassPolicy,
    StepContext,
    pre_pass,
    step_context,
)
from trainer_service.step.step_request import StepRequest

logger = logging.getLogger(__name__)


class TrainableCritic(PrePassCritic, Protocol):
    """What a step needs of a critic."""

    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> float: ...


class TrainablePolicy(PrePassPolicy, Protocol):
    """What a step needs of one rank's policy."""

    @property
    def critic(self) -> TrainableCritic: ...

    @property
    def shares_prefixes(self) -> bool: ...

    def own_micro_batches(self, batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]: ...

    def backward(self, loss: Tensor) -> None: ...

    def step(self, scale: float = 1.0) -> float: ...

    def discard_gradients(self, batch: MicroBatch) -> None: ...


class OptimizerSteps:
    """Makes the optimizer steps of one rank. It can learn from some groups before their step is full: their
    gradients accumulate in the policy, and their diagnostics accumulate here, as sums.

    Every rank makes the same calls with the same rows, and takes its share of the micro-batches. The loss
    does not depend on the number of ranks, or on the parts in which the rows of a step arrive."""

    def __init__(self, policy: TrainablePolicy, value_clip: float | None = None) -> None:
        """`value_clip` is the `clip` of the critic's `value_loss`, in units of the reward."""
        self._policy, self._value_clip = policy, value_clip
        self._rows: list[Row] = []
        """The rows whose gradients are accumulated for the next step."""
        self._parts: list[_StepPart] = []

    def accumulate(self, request: StepRequest) -> None:
        """Add the gradient of these rows of whole groups. The weights do not change."""
        policy, rows, algorithm = self._policy, request.rows, request.algorithm
        packed = list(micro_batches(rows, algorithm.micro_batch_tokens, policy.shares_prefixes))
        share = policy.own_micro_batches(packed)
        pre_passes = []
        for batch, _ in share:
            pre_passes.append(pre_pass(policy, batch, request.version, algorithm))
            request.beat()
        context = step_context(policy, share, pre_passes, algorithm)
        computed = sum(len(batch.ids_N) for batch in packed)
        part = _StepPart(share, pre_passes, context, counts_of(rows), computed)
        self._rows += rows
        self._parts.append(part)
        part.diagnostics = self._learn(part, request)

    def step(self, request: StepRequest) -> dict[str, float]:
        """Add the gradient of these last rows and make the step. Returns its metrics by name, on all ranks.

        If the gradient of an epoch is not finite, the weights keep the changes of the earlier epochs. Then
        the result has only `grad_norm` and `epochs`, the number of earlier epochs. In either case, no
        gradient stays accumulated.
        """
        if request.rows:
            self.accumulate(request)
        try:
            return self._step(request)
        finally:
            self._rows, self._parts = [], []

    def discard_gradients(self) -> None:
        """Drop the accumulated gradients, if there are any."""
        if self._parts:
            self._policy.discard_gradients(self._parts[0].share[0][0])
        self._rows, self._parts = [], []

    def _step(self, request: StepRequest) -> dict[str, float]:
        policy, algorithm, counts = self._policy, request.algorithm, counts_of(self._rows)
        # Gradients were accumulated with the divisor of the first part; the step scales them to its own.
        of_step, of_first = (divisor(each, algorithm.aggregation) for each in (counts, self._parts[0].counts))
        metrics: dict[str, float] = {}
        for epoch in range(algorithm.epochs):
            if epoch:
                for part in self._parts:
                    part.diagnostics = self._learn(part, request)
            grad_norm = policy.step(of_first / of_step)
            if not math.isfinite(grad_norm):  # DeepSpeed has left the weights as they were, on every rank
                return {"grad_norm": grad_norm, "epochs": epoch}
            own = [each for part in self._parts for each in part.in_step(of_step, algorithm)]
            measured = diagnostics(Sums.joined(policy.all_gather(own)))
            if epoch == 0:
                computed = sum(part.computed for part in self._parts)
                per_token = computed / counts.tokens
                metrics = {**measured, "grad_norm": grad_norm, "computed_per_token": per_token}
            else:  # in the first epoch, the ratios to the weights before the step are 1
                metrics |= {name: value for name, value in measured.items() if name.startswith("ppo/")}
        if algorithm.needs_critic:
            (part,) = self._parts  # only one, because returns are computed over the whole step
            metrics |= _critic_step(policy, part, counts.tokens, self._value_clip, request.beat)
        return metrics

    def _learn(self, part: "_StepPart", request: StepRequest) -> list[Sums]:
        policy, algorithm, found = self._policy, request.algorithm, []
        weight = part.divisor(algorithm) / self._parts[0].divisor(algorithm)
        for (batch, is_ours), before, advantages_T in zip(
            part.share, part.pre_passes, part.context.advantages, strict=True
        ):
            lp_new_T, entropy_T = policy.logprobs(batch)
            tokens = _tokens(policy, batch, before, lp_new_T, advantages_T, entropy_T, request)
            losses = policy_loss(tokens, algorithm, part.counts, part.context.statistics)
            loss = losses.loss
            if policy.routers is not None and part.context.load_E is not None:
                loss = loss + algorithm.router_aux_loss * policy.routers.aux_loss(part.context.load_E)
            routing = None if policy.routers is None else policy.routers.sums()
            policy.backward((weight if is_ours else 0.0) * loss)
            if is_ours:
                versions_T = policy.tensor(batch.versions_T)
                lp_begin_T = lp_new_T.detach() if before.lp_prox_T is None else before.lp_prox_T
                sampled = SampledTokens(lp_begin_T, entropy_T, versions_T)
                found.append(token_sums(tokens, sampled, losses, request.version))
                if routing is not None:
                    found[-1] = Sums.joined([found[-1], routing])
                if not part.diagnostics:  # the first pass over them
                    _log_masked_sessions(tokens.rows_T[~losses.finite_T], request.rows)
            request.beat()
        return found


@dataclass
class _StepPart:
    """Some whole groups of a step, and this rank's share of their micro-batches."""

    share: Sequence[tuple[MicroBatch, bool]]
    """False marks a micro-batch that only keeps the number of passes equal on all ranks."""
    pre_passes: Sequence[PrePass]
    context: StepContext
    counts: StepCounts
    computed: int
    """The tokens of the micro-batches of all ranks, in which a shared prefix is once."""
    diagnostics: Sequence[Sums] = ()
    """The diagnostics of its micro-batches, from the last pass that computed gradients."""

    def divisor(self, algorithm: AlgorithmSettings) -> int:
        return divisor(self.counts, algorithm.aggregation)

    def in_step(self, whole: int, algorithm: AlgorithmSettings) -> list[Sums]:
        """The diagnostics with the loss weights of the whole step. `whole` is the step's divisor."""
        share = self.divisor(algorithm) / whole
        return [
            replace(each, totals={**each.totals, "loss": each.totals["loss"] * share})
            for each in self.diagnostics
        ]


def _critic_step(
    policy: TrainablePolicy,
    part: _StepPart,
    tokens_in_step: int,
    value_clip: float | None,
    beat: Callable[[], None],
) -> dict[str, float]:
    """Make the critic's step, after the policy's step. Returns the critic's metrics by name."""
    own = []
    for (batch, is_ours), before, returns_T in zip(
        part.share, part.pre_passes, part.context.returns, strict=True
    ):
        assert before.values_T is not None  # noqa: S101 - `needs_critic`
        values_T = policy.critic.values(batch)
        found = value_loss(
            values_T, before.values_T, returns_T, tokens_in_step=tokens_in_step, clip=value_clip
        )
        policy.critic.backward(found.loss if is_ours else 0.0 * found.loss)
        if is_ours:
            own.append(critic_sums(before.values_T, returns_T, found))
        beat()
    grad_norm = policy.critic.step()
    if not math.isfinite(grad_norm):
        logger.warning("the critic makes no step: the norm of its gradient is %s", grad_norm)
    return {**critic_metrics(Sums.joined(policy.all_gather(own))), "critic/grad_norm": grad_norm}


def _log_masked_sessions(rows_N: Tensor, rows: Sequence[Row]) -> None:
    """Log the sessions of N tokens that the loss leaves out."""
    if names := sorted({rows[row].session_id for row in set(rows_N.tolist())}):
        logger.warning("tokens without a finite log-probability are left out, of sessions %s", names)


def counts_of(rows: Sequence[Row]) -> StepCounts:
    """The counts of a step's rows, or of a part of them. All rows of a session are one rollout."""
    return StepCounts(
        tokens_R=torch.tensor([row.trained_tokens for row in rows]),
        rollout_R=_numbered([row.session_id for row in rows]),
        group_R=_numbered([row.group_id for row in rows]),
    )


def _tokens(
    policy: TrainablePolicy,
    batch: MicroBatch,
    before: PrePass,
    lp_new_T: Tensor,
    advantages_T: Tensor,
    entropy_T: Tensor,
    request: StepRequest,
) -> Tokens:
    lp_roll_T = policy.tensor(batch.logprobs_T)
    lp_prox_T = before.lp_prox_T
    if request.algorithm.prox == "loglinear":
        versions_T = policy.tensor(batch.versions_T)
        lp_prox_T = loglinear(lp_new_T, lp_roll_T, versions_T, version=request.version + 1)
    return Tokens(
        lp_new_T=lp_new_T,
        lp_prox_T=lp_new_T.detach() if lp_prox_T is None else lp_prox_T,
        lp_roll_T=lp_roll_T,
        advantages_T=advantages_T,
        rows_T=policy.tensor(batch.rows_T),
        lp_ref_T=before.lp_ref_T,
        lp_teacher_T=None if batch.lp_teacher_T is None else policy.tensor(batch.lp_teacher_T),
        entropy_T=entropy_T if request.algorithm.entropy_bonus else None,
        fresh_T=before.fresh_T,
    )


def _numbered(names: Sequence[str]) -> Tensor:
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names], dtype=torch.int64)
