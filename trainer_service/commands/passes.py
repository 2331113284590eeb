"""Checks the datums of a pass, and makes the forward and backward passes over them on all ranks.

Datum ─ checked_pass ─▶ DatumRow, … ─ datum_batches ─ own share ─▶ log p ─▶ losses ─ backward
                                                      the values of all ranks, in order ◀─┘

Position i of a datum predicts the targets i, which need not be its token i + 1.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_queue.trainer_commands import Datum, ForwardBackward, OptimStep
from trainer_service.algorithms.summed_losses import RATIO_MASK, SummedLoss, check_inputs, chosen_loss
from trainer_service.model.trained_models import Models, TrainedModel
from trainer_service.rows.packing import Pack, layout_of, packs_of
from trainer_service.rows.rows import Floats, Ints, MicroBatch, TopTokens


@dataclass(frozen=True)
class DatumRow:
    """N tokens that the model reads, K targets for each, and the numbers of the loss."""

    ids_N: Ints
    targets_NK: Ints
    numbers: Mapping[str, Floats]
    """[N, K] each, by name."""

    def __len__(self) -> int:
        return len(self.ids_N)


def datum_batches(
    rows: Sequence[DatumRow], max_tokens: int, share_prefixes: bool = False
) -> Iterator[MicroBatch]:
    """Packs the rows, which have equally many targets for each position, as `micro_batches` does. The first
    targets are the tokens that are trained; the others are `teacher_top`. All temperatures are 1."""
    packs = packs_of([row.ids_N for row in rows], max_tokens, share_prefixes)
    return (_packed(rows, pack) for pack in packs)


def places_of(batch: MicroBatch, lengths_R: Ints) -> Ints:
    """[T]: where each trained token of the micro-batch is among the positions of all datums, one datum after
    the other. `lengths_R` has the length of each datum."""
    starts_R = lengths_R.cumsum() - lengths_R
    places_T: Ints = starts_R[batch.rows_T] + batch.positions_N[batch.predict_at_T]
    return places_T


def _packed(of_command: Sequence[DatumRow], pack: Pack) -> MicroBatch:
    layout = layout_of([row.ids_N for row in of_command], pack)
    rows = [of_command[row] for row in layout.places]
    targets_TK = np.concatenate([row.targets_NK for row in rows])
    none_T, zero_T = np.zeros(len(targets_TK), np.int64), np.zeros(len(targets_TK), np.float32)
    others_TK = targets_TK[:, 1:]
    return MicroBatch(
        ids_N=layout.ids_N,
        positions_N=layout.positions_N,
        lengths_S=layout.lengths_S,
        parents_S=layout.parents_S,
        predict_at_T=np.concatenate(list(layout.places.values())),
        targets_T=targets_TK[:, 0],
        logprobs_T=zero_T,
        advantages_T=zero_T,
        temperatures_T=np.ones(len(targets_TK), np.float32),
        versions_T=none_T,
        turns_T=none_T,
        rewards_T=zero_T,
        lp_teacher_T=None,
        rows_T=np.repeat(np.array(list(layout.places)), [len(row) for row in rows]),
        teacher_top=TopTokens(others_TK, np.zeros(others_TK.shape, np.float32)) if others_TK.size else None,
    )


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


class CommandRefused(Exception):
    """The command cannot be carried out as it is. The message is for the user."""


@dataclass(frozen=True)
class DatumLimits:
    """What the model can read."""

    vocab_size: int
    max_row_tokens: int | None
    """None: no bound."""


def checked_pass(command: ForwardBackward, limits: DatumLimits) -> tuple[SummedLoss, list[DatumRow]]:
    """The loss and the rows of a pass. Raises CommandRefused or LossRefused."""
    loss = chosen_loss(command.loss, command.config)
    if not command.data:
        raise CommandRefused("there are no datums")
    if len(kinds := {datum.k for datum in command.data}) > 1:
        raise CommandRefused(f"datums have {', '.join(map(str, sorted(kinds)))} targets for each position")
    for number, datum in enumerate(command.data):
        check_inputs(loss, datum.numbers.keys(), datum.k)
        _check_datum(number, datum, limits)
    return loss, [_row(datum) for datum in command.data]


def check_rates(command: OptimStep) -> None:
    """Raises CommandRefused for settings that AdamW cannot have."""
    for name, least in (("learning_rate", 0), ("eps", 0), ("weight_decay", 0), ("grad_clip_norm", 0)):
        value = getattr(command, name)
        if not (math.isfinite(value) and value >= least):
            raise CommandRefused(f"{name} must be a finite number of at least {least}, not {value}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(command, name) < 1:
            raise CommandRefused(f"{name} must be at least 0 and below 1, not {getattr(command, name)}")


def _check_datum(number: int, datum: Datum, limits: DatumLimits) -> None:
    if limits.max_row_tokens is not None and len(datum) > limits.max_row_tokens:
        raise CommandRefused(f"datum {number} has {len(datum)} tokens; at most {limits.max_row_tokens} fit")
    for name, ids in (("token", datum.tokens), ("target", datum.targets)):
        strange = _first_outside(ids, limits.vocab_size)
        if strange is not None:
            raise CommandRefused(
                f"datum {number} has {name} {strange}; the model knows 0 to {limits.vocab_size - 1}"
            )
    if RATIO_MASK in datum.numbers and not set(datum.numbers[RATIO_MASK]) <= {0.0, 1.0}:
        raise CommandRefused(f"datum {number}: {RATIO_MASK} must be 0 or 1")


def _first_outside(ids: Sequence[int], vocab_size: int) -> int | None:
    known = np.asarray(ids)
    outside = known[(known < 0) | (known >= vocab_size)]
    return int(outside[0]) if len(outside) else None


def _row(datum: Datum) -> DatumRow:
    shape = len(datum), datum.k
    numbers = {name: np.array(values, np.float32).reshape(shape) for name, values in datum.numbers.items()}
    return DatumRow(
        np.array(datum.tokens, np.int64), np.array(datum.targets, np.int64).reshape(shape), numbers
    )
