"""How far a step moved the policy, at a sample of the tokens that it learned from.

rows ─ every n-th ─▶ micro-batches ─ forward, after the step ─▶ logprobs ─ against those before it ─▶ update/*
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from trainer_service.batch import MicroBatch, Row, micro_batches
from trainer_service.diagnostics import Observed

Value = TypeVar("Value")


class Mover(Protocol):
    """What this needs of a policy: one rank's, of perhaps several."""

    def share(self, batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]: ...

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]: ...

    def everybody(self, values: list[Value]) -> list[Value]: ...


@torch.no_grad()
def update(
    policy: Mover,
    rows: Sequence[Row],
    step: Observed,
    max_tokens: int,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """With d = log(new / old) of each token, in nats: `update/abs_logp` is the mean of |d|, and `update/kl`
    that of exp(d) - 1 - d, which estimates KL(old || new) (k3 of Schulman, "Approximating KL Divergence").

    `rows` are those of the step and `step` is what all ranks saw of them before it. The sample is between one
    and two passes of `max_tokens`, or everything; every rank has to call it. Tokens without a finite
    log-probability are left out, and nothing is said where none is left.
    """
    every = max(1, sum(len(row) for row in rows) // max_tokens)
    after = []
    for batch, is_ours in policy.share(list(micro_batches(rows[::every], max_tokens))):
        logprobs_T = policy.logprobs(batch)[0].cpu()
        if is_ours:
            after.append((torch.from_numpy(batch.rows_T) * every, logprobs_T))
        beat()
    numbers, told = zip(*policy.everybody(after), strict=True)
    after_T = _by_row(torch.cat(told), torch.cat(numbers))
    sampled_T = step.rows_T % every == 0
    before_T = _by_row(step.lp_begin_T[sampled_T], step.rows_T[sampled_T])
    moved_T = (after_T - before_T).double()
    moved_T = moved_T[moved_T.isfinite()]
    if not len(moved_T):
        return {}
    return {
        "update/abs_logp": float(moved_T.abs().mean()),
        "update/kl": float((moved_T.expm1() - moved_T).mean()),
    }


def _by_row(values_T: Tensor, rows_T: Tensor) -> Tensor:
    """The tokens of a row keep their order, wherever it was packed."""
    ordered_T: Tensor = values_T[rows_T.argsort(stable=True)]
    return ordered_T
