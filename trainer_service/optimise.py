"""One batch through the policy: forward, loss, backward, step; and what it said of itself."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer_service.batch import MicroBatch, Row, micro_batches
from trainer_service.diagnostics import Observed, diagnostics
from trainer_service.loss import policy_loss
from trainer_service.settings import AlgorithmSettings


class Learner(Protocol):
    """What `optimise` needs of a policy."""

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]: ...

    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> float: ...

    def tensor(self, values: Any) -> Tensor: ...


def optimise(
    learner: Learner,
    rows: Sequence[Row],
    version: int,
    algorithm: AlgorithmSettings,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Train on `rows`, which `version` is the newest to have seen. `beat` is called between micro-batches.

    With one epoch the weights that the ratio is taken to are those of the forward pass itself, so r is 1
    and only its gradient matters; with more, a pass before the first keeps them.
    """
    batches = list(micro_batches(rows, algorithm.max_tokens))
    tokens = sum(len(batch.targets_T) for batch in batches)
    anchors = [_anchor(learner, batch) for batch in batches] if algorithm.epochs > 1 else None
    metrics: dict[str, float] = {}
    for epoch in range(algorithm.epochs):
        seen = []
        for index, batch in enumerate(batches):
            lp_new_T, entropy_T = learner.logprobs(batch)
            lp_prox_T = lp_new_T.detach() if anchors is None else anchors[index]
            lp_roll_T = learner.tensor(batch.logprobs_T)
            advantages_T = learner.tensor(batch.advantages_T)
            rows_T = learner.tensor(batch.rows_T)
            losses = policy_loss(lp_new_T, lp_prox_T, lp_roll_T, advantages_T, rows_T, tokens, algorithm)
            learner.backward(losses.loss)
            seen.append(
                Observed.of(
                    losses,
                    lp_prox_T=lp_prox_T,
                    lp_roll_T=lp_roll_T,
                    advantages_T=advantages_T,
                    entropy_T=entropy_T,
                    versions_T=learner.tensor(batch.versions_T),
                    rows_T=rows_T,
                )
            )
            beat()
        grad_norm = learner.step()
        if epoch == 0:
            metrics = diagnostics(Observed.joined(seen), version, algorithm.tis_cap)
            metrics["grad_norm"] = grad_norm
        else:  # what clips or diverges does so in the later epochs
            if not math.isfinite(grad_norm):
                metrics["grad_norm"] = grad_norm
            later = diagnostics(Observed.joined(seen), version, algorithm.tis_cap)
            metrics |= {name: value for name, value in later.items() if name.startswith("ppo/")}
    return metrics


@torch.no_grad()
def _anchor(learner: Learner, batch: MicroBatch) -> Tensor:
    return learner.logprobs(batch)[0]
