"""A probe of the base model: short rows, the model's own values for each row alone, and those of other ways.

a row alone ─ the model's own attention, all of its logits ─▶ log p, entropy: the truth
the same, with one rounding more after each layer ─▶ the model's noise ─▶ the allowed difference
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_service.model.attention.packed_attention import Packing
from trainer_service.model.forward import scores
from trainer_service.model.self_check.measures import (
    allowed_difference,
    difference,
    own_logits,
    own_scores,
    rounded_once_more,
)
from trainer_service.model.self_check.outcome import first_words
from trainer_service.model.self_check.probe_rows import FAR_TOKENS, far_position, far_row, probe_rows
from trainer_service.rows.rows import MicroBatch, Row, micro_batches


@dataclass(frozen=True)
class Found:
    """What one way of computing the rows gives."""

    difference: float
    """From the truth, in nats; infinite if a pass fails."""
    error: str | None = None

    def within(self, allowed: float) -> bool:
        return self.difference <= allowed

    @property
    def words(self) -> str:
        return f"a pass fails ({self.error})" if self.error else f"at most {self.difference:.1g} nats off"


@dataclass(frozen=True)
class ModelProbe:
    """The rows, their true values, and the ways to compute them."""

    model: Any
    device: torch.device
    rows: Sequence[Row]
    truths: Sequence[Tensor]
    """log p and entropy [T, 2] of each row."""
    columns: int
    """The number of the model's logits."""
    allowed: float
    """The largest difference that rounding explains, in nats."""

    def alone(self) -> Found:
        """Each row in a pass of its own, as the trainer computes it."""

        def found() -> float:
            return max(
                self._difference([number], Packing.ONE_ROW, shares=False) for number in range(len(self.rows))
            )

        return _tried(found)

    def packed(self, packing: Packing, shares: bool) -> Found:
        """All rows in one pass; with `shares`, their common prefix is in it once."""
        return _tried(lambda: self._difference(range(len(self.rows)), packing, shares))

    def without_later_tokens(self) -> Found:
        """A row whose last quarter is another one: the values before it must not change."""
        row, truth_T2 = self.rows[-1], self.truths[-1]
        kept = 3 * len(row) // 4
        ids_L = np.concatenate([row.ids_L[:kept], np.roll(row.ids_L[kept:], 1)])

        def found() -> float:
            other = replace(row, ids_L=ids_L)
            seen_T2 = own_scores(own_logits(self.model, other, self.device), other)
            return difference(seen_T2[: kept - 1], truth_T2[: kept - 1])

        return _tried(found)

    def _difference(self, numbers: Sequence[int], packing: Packing, shares: bool) -> float:
        rows = [self.rows[number] for number in numbers]
        far = far_position(self.model) if len(rows) > 1 else None
        rows += [] if far is None else [far_row()]
        (batch,) = micro_batches(rows, sum(map(len, rows)), shares)
        if far is not None:
            batch = _moved(batch, far)
        lp_T, entropy_T, _ = scores(self.model, batch, packing, self.device)
        order = dict.fromkeys(batch.rows_T.tolist())
        truth_T2 = torch.cat([self.truths[numbers[row]] for row in order])
        return difference(torch.stack([lp_T, entropy_T], 1), truth_T2)


def _moved(batch: MicroBatch, far: int) -> MicroBatch:
    """The micro-batch with the positions of its far row from `far` on."""
    positions_N, ends_S = batch.positions_N.copy(), batch.lengths_S.cumsum()
    end = int(ends_S[batch.lengths_S == FAR_TOKENS][0])
    positions_N[end - FAR_TOKENS : end] += far
    return replace(batch, positions_N=positions_N)


def probe_of(model: Any, layers: Sequence[Any], device: torch.device) -> ModelProbe:
    """Make a probe. Raises what the model raises if it cannot compute a row alone."""
    rows = probe_rows(model)
    logits = [own_logits(model, row, device) for row in rows]
    truths = [own_scores(*pair) for pair in zip(logits, rows, strict=True)]
    if any(truth_T2.isnan().any() for truth_T2 in truths):
        raise ValueError("it gives NaN, so its weights are not finite, or too large for their type")
    with rounded_once_more(model, layers):
        noisy_T2 = own_scores(own_logits(model, rows[-1], device), rows[-1])
    allowed = allowed_difference(difference(noisy_T2, truths[-1]), torch.cat(truths))
    return ModelProbe(model, device, rows, truths, logits[0].shape[-1], allowed)


def _tried(found: Callable[[], float]) -> Found:
    try:
        return Found(found())
    except Exception as error:  # whatever the model's code raises
        return Found(torch.inf, first_words(error))
