"""Finds the groups of a batch whose gradient is not finite, by bisection and without an optimizer step.

batch ─ not finite ─┬─ half ─ finite
                    └─ half ─ not finite ─┬─ …      down to single groups
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from trainer_service.algorithms.aggregation import StepCounts
from trainer_service.algorithms.policy_loss import policy_loss, step_statistics
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.algorithms.tokens import Tokens
from trainer_service.model.deepspeed_policy import DeepSpeedPolicy
from trainer_service.rows.rows import MicroBatch, micro_batches
from trainer_service.step.step_parts import StepRequest, counts_of

Group = TypeVar("Group")


def non_finite_groups(groups: Sequence[Group], is_finite: Callable[[Sequence[Group]], bool]) -> list[Group]:
    """The groups whose own gradient is not finite; empty if the joint gradient of all groups is finite.

    If every group has a finite gradient and their joint gradient is not finite, these are the smallest part
    that bisection finds whose joint gradient is not finite.
    """
    if is_finite(groups):
        return []
    if len(groups) == 1:
        return list(groups)
    middle = len(groups) // 2
    halves = (groups[:middle], groups[middle:])
    found = [group for half in halves for group in non_finite_groups(half, is_finite)]
    return found or list(groups)


def has_finite_gradient(policy: DeepSpeedPolicy, request: StepRequest) -> bool:
    """Whether the gradient of this step's loss is finite. All ranks must call it, and get the same result. It
    changes nothing."""
    norm, counts, algorithm = 0.0, counts_of(request.rows), request.algorithm
    for batch in micro_batches(request.rows, algorithm.micro_batch_tokens, policy.shares_prefixes):
        norm += policy.gradient_norm(batch, _loss(policy, batch, counts, algorithm))
        request.beat()
        if not math.isfinite(norm):
            return False
    return True


def _loss(
    policy: DeepSpeedPolicy, batch: MicroBatch, counts: StepCounts, algorithm: AlgorithmSettings
) -> Callable[[Tensor], Tensor]:
    """The loss of a micro-batch, as a function of its log-probabilities [T].

    The policy's own detached log-probabilities replace those of the reference, the teacher and the policy
    before the step. The entropy is 0, and the KL to the teacher's top tokens is -lp. If the algorithm gives
    each token its own advantage, each advantage is 1.
    """

    def loss_of(lp_new_T: Tensor) -> Tensor:
        own_T = lp_new_T.detach()
        advantages_T = policy.tensor(batch.advantages_T)
        tokens = Tokens(
            lp_new_T=lp_new_T,
            lp_prox_T=own_T,
            lp_roll_T=policy.tensor(batch.logprobs_T),
            advantages_T=torch.ones_like(own_T) if algorithm.credits_tokens else advantages_T,
            rows_T=policy.tensor(batch.rows_T),
            lp_ref_T=own_T,
            lp_teacher_T=own_T,
            entropy_T=torch.zeros_like(own_T),
            teacher_kl_T=-lp_new_T,
        )
        return policy_loss(tokens, algorithm, counts, step_statistics(tokens, algorithm)).loss

    return loss_of
