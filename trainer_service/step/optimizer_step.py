"""Makes one rank's optimizer steps: forward, loss, backward, step, and the step's metrics.

rows ─ step_parts ─▶ StepPart ─▶ logprobs ─ policy_loss ─ backward ─▶ … ─▶ step
  └── accumulate: once for all rows, or for groups as they arrive ──┘

With `mini_batches`, the weights are updated after each part.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from trainer_service.algorithms.aggregation import divisor
from trainer_service.algorithms.imitation import top_k_kl
from trainer_service.algorithms.policy_loss import policy_loss
from trainer_service.algorithms.returns import value_loss
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.algorithms.sums import Sums
from trainer_service.algorithms.tokens import Tokens, loglinear
from trainer_service.model.forward import TokenScores
from trainer_service.rows.rows import MicroBatch, Row
from trainer_service.step.diagnostics import (
    SampledTokens,
    critic_metrics,
    critic_sums,
    diagnostics,
    token_sums,
)
from trainer_service.step.pre_pass import PrePass, TrainablePolicy
from trainer_service.step.step_attempts import OutOfMemory, is_out_of_memory
from trainer_service.step.step_parts import (
    LearnedTokens,
    StepPart,
    StepRequest,
    TurnRecord,
    counts_of,
    step_parts,
    turn_records,
)

logger = logging.getLogger(__name__)


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
        self._parts: list[StepPart] = []
        self.records: Sequence[TurnRecord] = ()
        """What the last step that was made has used of each turn's tokens, on all ranks."""

    def accumulate(self, request: StepRequest) -> None:
        """Add the gradient of these rows of whole groups. The weights do not change.

        Raises OutOfMemory if a pass does not fit; then no gradient stays accumulated. With several ranks it
        raises torch's error, and they have to end: the others wait for this one in a collective.
        """
        try:
            self._accumulate(request)
            return
        except RuntimeError as error:
            if not (is_out_of_memory(error) and self._policy.ranks == 1):
                raise
            reason = str(error)
        # Not before here, because the error's traceback keeps the tensors of the pass.
        self.discard_gradients()
        raise OutOfMemory(reason)

    def _accumulate(self, request: StepRequest) -> None:
        parts = step_parts(self._policy, request, len(self._rows))
        self._rows += request.rows
        self._parts += parts
        # The other parts, if there are any, are mini-batches, which learn after the update of this one.
        self._learn(parts[0], self._parts[0], request)

    def step(self, request: StepRequest) -> dict[str, float]:
        """Add the gradient of these last rows and make the step. Returns its metrics by name, on all ranks.

        If the gradient of an update is not finite, the weights keep the changes of the earlier updates. Then
        the result has only `grad_norm` and `updates`, the number of earlier updates. In either case, no
        gradient stays accumulated. Raises OutOfMemory as `accumulate` does.
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
            self._policy.discard_gradients()
        self._rows, self._parts = [], []

    def _step(self, request: StepRequest) -> dict[str, float]:
        policy, algorithm, counts = self._policy, request.algorithm, counts_of(self._rows)
        self.records = ()
        updates = [_Update(self._parts, divisor(counts, algorithm.aggregation))]
        if algorithm.mini_batches > 1:
            updates = [_Update([part], part.divisor(algorithm)) for part in self._parts]
        metrics, rate = dict[str, float](), policy.learning_rate
        for epoch in range(algorithm.epochs):
            grad_norms = []
            for number, update in enumerate(updates):
                if epoch or number:  # `accumulate` has made the first pass
                    for part in update.parts:
                        self._learn(part, update.parts[0], request)
                # Gradients were accumulated with the divisor of the first part.
                grad_norms.append(policy.step(update.parts[0].divisor(algorithm) / update.divisor))
                if not math.isfinite(grad_norms[-1]):  # DeepSpeed left the weights unchanged, on every rank
                    return {"grad_norm": grad_norms[-1], "updates": epoch * len(updates) + number}
            own = [each for update in updates for each in update.diagnostics(algorithm, len(updates))]
            measured = diagnostics(Sums.joined(policy.all_gather(own)))
            if epoch == 0:
                computed = sum(part.computed for part in self._parts)
                per_token = computed / counts.tokens
                metrics = {**measured, "grad_norm": max(grad_norms), "computed_per_token": per_token}
                metrics["learning_rate"] = rate
            else:  # in the first epoch, the ratios to the weights before the step are 1
                metrics |= {name: value for name, value in measured.items() if name.startswith("ppo/")}
        if algorithm.needs_critic:
            metrics |= _critic_steps(policy, self._parts, self._value_clip, request.beat)
        if request.recorded != "none":
            found = [each for part in self._parts for each in part.learned or ()]
            own_turns = [record for each in found for record in turn_records(each, self._rows)]
            self.records = policy.all_gather(own_turns)
        return metrics

    def _learn(self, part: StepPart, first: StepPart, request: StepRequest) -> None:
        """Add the gradient of a part. `first` is the first part of the same update."""
        policy, algorithm, found, learned = self._policy, request.algorithm, [], []
        weight = part.divisor(algorithm) / first.divisor(algorithm)
        for (batch, is_ours), before, advantages_T in zip(
            part.share, part.pre_passes, part.context.advantages, strict=True
        ):
            scored = policy.scores(batch)
            lp_new_T, entropy_T = scored.lp_T, scored.entropy_T
            tokens = _tokens(policy, batch, before, scored, advantages_T, request)
            losses = policy_loss(tokens, algorithm, part.counts, part.context.statistics)
            loss = losses.loss
            if policy.routers is not None and part.load_E is not None:
                loss = loss + algorithm.router_aux_loss * policy.routers.aux_loss(part.load_E)
            routing = None if policy.routers is None else policy.routers.sums()
            policy.backward((weight if is_ours else 0.0) * loss)
            if is_ours:
                versions_T = policy.tensor(batch.versions_T)
                lp_begin_T = lp_new_T.detach() if before.lp_prox_T is None else before.lp_prox_T
                sampled = SampledTokens(lp_begin_T, entropy_T, versions_T)
                if request.recorded != "none" and part.learned is None:
                    learned.append(_learned(batch, part.rows_before, tokens, lp_begin_T, request))
                found.append(token_sums(tokens, sampled, losses, request.version))
                if routing is not None:
                    found[-1] = Sums.joined([found[-1], routing])
                if not part.diagnostics:  # the first pass over them
                    _log_masked_sessions(tokens.rows_T[~losses.finite_T], request.rows)
            request.beat()
        part.diagnostics = found
        if part.learned is None:
            part.learned = learned


@dataclass(frozen=True)
class _Update:
    """The parts of a step that change the weights together."""

    parts: Sequence[StepPart]
    divisor: int
    """The divisor of the loss of all parts."""

    def diagnostics(self, algorithm: AlgorithmSettings, updates: int) -> list[Sums]:
        """The diagnostics of its parts. The loss of the step is the mean of those of its updates."""
        return [
            each
            for part in self.parts
            for each in part.in_step(part.divisor(algorithm) / self.divisor / updates)
        ]


def _critic_steps(
    policy: TrainablePolicy,
    parts: Sequence[StepPart],
    value_clip: float | None,
    beat: Callable[[], None],
) -> dict[str, float]:
    """Make the critic's update for each part, after all updates of the policy. Returns the critic's metrics
    by name."""
    own, grad_norms = [], []
    for part in parts:
        for (batch, is_ours), before, returns_T in zip(
            part.share, part.pre_passes, part.context.returns, strict=True
        ):
            assert before.values_T is not None  # noqa: S101 - `needs_critic`
            values_T = policy.critic.values(batch)
            found = value_loss(
                values_T, before.values_T, returns_T, tokens_in_step=part.counts.tokens, clip=value_clip
            )
            policy.critic.backward(found.loss if is_ours else 0.0 * found.loss)
            if is_ours:
                own.append(critic_sums(before.values_T, returns_T, found))
            beat()
        grad_norms.append(policy.critic.step())
        if not math.isfinite(grad_norms[-1]):
            logger.warning("the critic makes no update: the norm of its gradient is %s", grad_norms[-1])
    return {**critic_metrics(Sums.joined(policy.all_gather(own))), "critic/grad_norm": max(grad_norms)}


def _log_masked_sessions(rows_N: Tensor, rows: Sequence[Row]) -> None:
    """Log the sessions of N tokens that the loss leaves out."""
    if names := sorted({rows[row].session_id for row in set(rows_N.tolist())}):
        logger.warning("tokens without a finite log-probability are left out, of sessions %s", names)


def _learned(
    batch: MicroBatch, rows_before: int, tokens: Tokens, lp_begin_T: Tensor, request: StepRequest
) -> LearnedTokens:
    """What the loss uses of these tokens, as far as it is recorded."""
    advantages_T = tokens.advantages_T if request.algorithm.loss.uses_advantages else None
    log_rho_T = lp_begin_T.detach() - tokens.lp_roll_T if request.recorded == "all" else None
    return LearnedTokens(batch.rows_T + rows_before, batch.turns_T, advantages_T, log_rho_T)


def _tokens(
    policy: TrainablePolicy,
    batch: MicroBatch,
    before: PrePass,
    scored: TokenScores,
    advantages_T: Tensor,
    request: StepRequest,
) -> Tokens:
    lp_new_T, lp_roll_T = scored.lp_T, policy.tensor(batch.logprobs_T)
    teacher_kl_T = None
    if scored.top_TK is not None and batch.teacher_top is not None:
        teacher_kl_T = top_k_kl(scored.top_TK, policy.tensor(batch.teacher_top.lp_TK))
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
        entropy_T=scored.entropy_T if request.algorithm.entropy_bonus else None,
        teacher_kl_T=teacher_kl_T,
        fresh_T=before.fresh_T,
    )
