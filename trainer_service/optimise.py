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
    """What `optimise` needs of a policy: one rank's, of perhaps several."""

    def share(self, batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]: ...

    def gathered(self, seen: list[Observed]) -> list[Observed]: ...

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

    Every rank is given the same rows and takes its share of their micro-batches; the loss is that of all of
    them, whatever their number. Rank 0 returns the metrics of the step, the others its gradient's norm.

    Ends at a gradient that is not finite, with its norm and how many epochs have changed the weights before.
    """
    batches = list(micro_batches(rows, algorithm.max_tokens))
    tokens = sum(len(batch.targets_T) for batch in batches)
    share = learner.share(batches)
    anchors = [_anchor(learner, batch) for batch, _ in share] if algorithm.epochs > 1 else None
    metrics: dict[str, float] = {}
    for epoch in range(algorithm.epochs):
        seen = []
        for index, (batch, counts) in enumerate(share):
            lp_new_T, entropy_T = learner.logprobs(batch)
            lp_prox_T = lp_new_T.detach() if anchors is None else anchors[index]
            lp_roll_T = learner.tensor(batch.logprobs_T)
            advantages_T = learner.tensor(batch.advantages_T)
            rows_T = learner.tensor(batch.rows_T)
            losses = policy_loss(lp_new_T, lp_prox_T, lp_roll_T, advantages_T, rows_T, tokens, algorithm)
            learner.backward(losses.loss if counts else 0.0 * losses.loss)
            if counts:
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
        if not math.isfinite(grad_norm):  # DeepSpeed has left the weights as they were, on every rank
            return {"grad_norm": grad_norm, "epochs": epoch}
        told = learner.gathered(seen)
        said = diagnostics(Observed.joined(told), version, algorithm.tis_cap) if told else {}
        if epoch == 0:
            metrics = {**said, "grad_norm": grad_norm}
        else:  # what clips does so in the later epochs
            metrics |= {name: value for name, value in said.items() if name.startswith("ppo/")}
    return metrics


@torch.no_grad()
def _anchor(learner: Learner, batch: MicroBatch) -> Tensor:
    return learner.logprobs(batch)[0]
