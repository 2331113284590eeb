"""Computes the ages of rows in versions, split into the time of sampling and the time of waiting.

`async.prime_staleness` is a case of `algorithms_golden.json` in the tests.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Staleness(NamedTuple):
    """For each of R rows, numbers of versions between its sampling and the step that trains it; int64."""

    total_R: Tensor
    in_flight_R: Tensor
    """Between the row's oldest and newest token."""
    in_queue_R: Tensor
    """Between the row's newest token and the step."""


def staleness(version: int, first_R: Tensor, last_R: Tensor) -> Staleness:
    """The staleness of rows in a step that begins with `version`. `first_R` and `last_R` are the oldest and
    newest versions that sampled their tokens (prime-rl, where the step is numbered version + 1;
    `async.prime_staleness`)."""
    total_R = (version - first_R).clamp(min=0)
    in_flight_R = torch.minimum(total_R, (last_R - first_R).clamp(min=0))
    return Staleness(total_R, in_flight_R, total_R - in_flight_R)
