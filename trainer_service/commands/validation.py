"""Checks commands before they have any effect."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout_queue.commands.command import ForwardBackward, OptimStep
from rollout_queue.commands.datum import Datum
from trainer_service.algorithms.summed_losses.chosen import RATIO_MASK, SummedLoss, check_inputs, chosen_loss
from trainer_service.rows.datum_batches import DatumRow


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
