"""One forward pass over datums, with or without a backward pass, on all ranks.

DatumRow, … ─ datum_batches ─ own share ─▶ log p ─▶ losses ─ backward ─▶ the values of all ranks, in order
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer_service.algorithms.summed_losses.chosen import SummedLoss
from trainer_service.model.trained.models import Models
from trainer_service.model.trained.trained_model import TrainedModel
from trainer_service.rows.datum_batches import DatumRow, datum_batches, places_of
from trainer_service.rows.rows import Floats, Ints, MicroBatch


@dataclass(frozen=True)
class PassWork:
    """What every rank is told of a pass."""

    model_id: str
    loss: SummedLoss
    rows: Sequence[DatumRow]
    """With equally many targets for each position."""
    forward_only: bool
    max_tokens: int
    """The largest number of tokens in a micro-batch."""


class ScoredTargets(NamedTuple):
    """The values of some positions."""

    at_T: Ints
    """Where they are among the positions of all datums."""
    lp_TK: Floats
    losses_TK: Floats


class PassValues(NamedTuple):
    """The values of all P positions, one datum after the other."""

    lp_PK: Floats
    losses_PK: Floats


def run_pass(models: Models, work: PassWork, beat: Callable[[], None] = lambda: None) -> PassValues:
    """Make the pass, and add its gradient unless it is `forward_only`. Every rank must call it. `beat` is
    called after each micro-batch."""
    model = models[work.model_id]
    lengths_R = np.array([len(row) for row in work.rows])
    numbers_PK = {name: np.concatenate([row.numbers[name] for row in work.rows]) for name in work.loss.inputs}
    batches = list(datum_batches(work.rows, work.max_tokens, models.shares_prefixes))
    found: list[ScoredTargets] = []
    for batch, is_ours in models.own_micro_batches(batches):
        at_T = places_of(batch, lengths_R)
        with torch.no_grad() if work.forward_only else nullcontext():
            lp_TK = _targets_scored(model, batch)
            inputs = {name: model.tensor(values_PK[at_T]) for name, values_PK in numbers_PK.items()}
            losses_TK = work.loss.losses(lp_TK, inputs, model.tensor(batch.rows_T))
        if not work.forward_only:
            model.backward((1.0 if is_ours else 0.0) * losses_TK.sum())
        if is_ours:
            found.append(ScoredTargets(at_T, _on_host(lp_TK), _on_host(losses_TK)))
        beat()
    return _in_order(models.all_gather(found), int(lengths_R.sum()))


def _targets_scored(model: TrainedModel, batch: MicroBatch) -> Tensor:
    scored = model.scores(batch)
    first_T1 = scored.lp_T[:, None]
    return first_T1 if scored.top_TK is None else torch.cat([first_T1, scored.top_TK], 1)


def _on_host(values: Tensor) -> Floats:
    array: Floats = values.detach().float().cpu().numpy()
    return array


def _in_order(parts: Sequence[ScoredTargets], positions: int) -> PassValues:
    shape = positions, parts[0].lp_TK.shape[1]
    lp_PK, losses_PK = np.empty(shape, np.float32), np.empty(shape, np.float32)
    for part in parts:
        lp_PK[part.at_T], losses_PK[part.at_T] = part.lp_TK, part.losses_TK
    return PassValues(lp_PK, losses_PK)
