"""How old samples are, and how many may be under way so that none becomes too old."""

import math
from typing import NamedTuple


class Staleness(NamedTuple):
    """Versions that passed since a row's first token."""

    total: int
    in_flight: int
    """While it was sampled."""
    in_queue: int
    """While it waited to be trained."""


def staleness(version: int, first: int, last: int) -> Staleness:
    """Of a row sampled by versions `first` to `last`, for a step that starts from `version`
    (prime-rl, which counts the step as version + 1; `async.prime_staleness`)."""
    total = max(0, version - first)
    in_flight = min(total, max(0, last - first))
    return Staleness(total, in_flight, total - in_flight)


def areal_capacity(
    *, max_staleness: int, version: int, accepted: int, running: int, batch: int, max_concurrent: int
) -> int:
    """How many rollouts may start now, never below 0: min(max_concurrent - running,
    (max_staleness + version + 1) · batch - (accepted + running)) (AReaL, arXiv:2505.24298;
    `async.areal_capacity`). `accepted` counts all that were ever taken, `batch` those of one step."""
    fresh = (max_staleness + version + 1) * batch - (accepted + running)
    return max(0, min(max_concurrent - running, fresh))


def verl_rollout_number(
    *, staleness: float, sync_steps: int, batches: int, mini_batch: int, stale: int
) -> int:
    """How many rollouts to make between two pushes of weights, never below 0: (1 + staleness) · sync_steps ·
    batches · mini_batch - stale (verl; `async.verl_rollout_num`). `staleness` is the share of them that may
    be left for after the push, `stale` what was left by the last."""
    # Rounded first: 1.15 · 100 is a little less than 115, and the floor of that is 114.
    wanted = math.floor(round((1 + staleness) * sync_steps * batches * mini_batch, 6))
    return max(0, wanted - stale)
