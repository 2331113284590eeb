"""One batch through the policy: look, forward, loss, backward, step; and what it said of itself.

rows ─ micro_batches ─ share ─▶ look? ─ survey ─▶ logprobs ─ policy_loss ─ backward ─▶ … ─▶ step
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer_service.algorithm_settings import AlgorithmSettings
from trainer_service.algorithms.aggregation import StepCounts
from trainer_service.algorithms.critic import value_loss
from trainer_service.algorithms.policy_loss import policy_loss
from trainer_service.algorithms.prox import loglinear
from trainer_service.algorithms.tokens import Tokens
from trainer_service.batch import MicroBatch, Row, micro_batches
from trainer_service.diagnostics import Criticised, Observed, diagnostics, of_critic
from trainer_service.look import Look, Seer, Survey, Valuer, look, survey

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

    def step(self) -> float: ...


def optimise(
    learner: Learner,
    rows: Sequence[Row],
    version: int,
    algorithm: AlgorithmSettings,
    beat: Callable[[], None] = lambda: None,
    value_clip: float | None = None,
) -> dict[str, float]:
    """Train on `rows`, which `version` is the newest to have seen. `beat` is called between micro-batches.

    Every rank is given the same rows and takes its share of their micro-batches; the loss is that of all of
    them, whatever their number. All ranks return the metrics of the step.

    Ends at a gradient that is not finite, with its norm and how many epochs have changed the weights before.
    """
    batches = list(micro_batches(rows, algorithm.max_tokens))
    share = learner.share(batches)
    counts = counts_of(rows)
    looks = []
    for batch, _ in share:
        looks.append(look(learner, batch, version, algorithm))
        beat()
    known = survey(learner, share, looks, algorithm)
    metrics: dict[str, float] = {}
    for epoch in range(algorithm.epochs):
        seen = []
        for (batch, is_ours), before, advantages_T in zip(share, looks, known.advantages, strict=True):
            lp_new_T, entropy_T = learner.logprobs(batch)
            tokens = _tokens(learner, batch, before, lp_new_T, advantages_T, entropy_T, version, algorithm)
            losses = policy_loss(tokens, algorithm, counts, known.statistics)
            learner.backward(losses.loss if is_ours else 0.0 * losses.loss)
            if is_ours:
                versions_T = learner.tensor(batch.versions_T)
                lp_begin_T = lp_new_T.detach() if before.lp_prox_T is None else before.lp_prox_T
                seen.append(
                    Observed.of(
                        tokens, losses, lp_begin_T=lp_begin_T, entropy_T=entropy_T, versions_T=versions_T
                    )
                )
            beat()
        grad_norm = learner.step()
        if not math.isfinite(grad_norm):  # DeepSpeed has left the weights as they were, on every rank
            return {"grad_norm": grad_norm, "epochs": epoch}
        said = diagnostics(Observed.joined(learner.everybody([each.cpu() for each in seen])), version)
        if epoch == 0:
            metrics = {**said, "grad_norm": grad_norm}
        else:  # what clips does so in the later epochs
            metrics |= {name: value for name, value in said.items() if name.startswith("ppo/")}
    if algorithm.needs_critic:
        metrics |= _criticised(learner, share, looks, known, counts.tokens, value_clip, beat)
    return metrics


def _criticised(
    learner: Learner,
    share: Sequence[tuple[MicroBatch, bool]],
    looks: Sequence[Look],
    known: Survey,
    tokens_in_step: int,
    value_clip: float | None,
    beat: Callable[[], None],
) -> dict[str, float]:
    """The critic's step, once the policy has made its own."""
    seen = []
    for (batch, is_ours), before, returns_T in zip(share, looks, known.returns, strict=True):
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
    """Of the rows of a whole step. Forks of a session share its rollout."""
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
    version: int,
    algorithm: AlgorithmSettings,
) -> Tokens:
    lp_roll_T = learner.tensor(batch.logprobs_T)
    lp_prox_T = before.lp_prox_T
    if algorithm.prox == "loglinear":
        versions_T = learner.tensor(batch.versions_T)
        lp_prox_T = loglinear(lp_new_T, lp_roll_T, versions_T, version=version + 1)
    return Tokens(
        lp_new_T=lp_new_T,
        lp_prox_T=lp_new_T.detach() if lp_prox_T is None else lp_prox_T,
        lp_roll_T=lp_roll_T,
        advantages_T=advantages_T,
        rows_T=learner.tensor(batch.rows_T),
        lp_ref_T=before.lp_ref_T,
        lp_teacher_T=None if batch.teacher_T is None else learner.tensor(batch.teacher_T),
        entropy_T=entropy_T if algorithm.entropy_bonus else None,
        fresh_T=before.fresh_T,
    )


def _numbered(names: Sequence[str]) -> Tensor:
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names], dtype=torch.int64)
