"""Checks that two trainings did the same: that their weights moved alike and their metrics agree."""

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from tests.support.tolerances import FLOAT32, ulps

Weights = Mapping[str, Tensor]

WELL_CONDITIONED: dict[str, Any] = {"lr": 0.1, "warmup_steps": 0, "max_grad_norm": 1e-8}
"""Settings that clip gradients to the size of AdamW's epsilon, 1e-8.

AdamW moves a weight by lr · m / (√v + 1e-8). Suppose that rounding decides the sign of a gradient, and the
gradient is still much larger than 1e-8. Then AdamW makes a whole step of size lr from it, and rounding has no
useful bound. If no gradient is above 1e-8, a step is almost one of plain gradient descent: relative to lr, it
changes by at most twice the change of m / 1e-8. A wrong scale of the gradient is still found: it shows in the
norm, which is reported before clipping.
"""
TERMS = 512
"""How many terms a gradient has in these tests: the tokens of a step, at most 12 rows of 38."""
DEPTH = 32
"""The roundings in a metric that is near 0: torch adds 512 terms pairwise, in 9 layers, and the forward pass
has rounded each term."""


def differs_by(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def assert_moved_alike(
    one: Weights,
    other: Weights,
    since: Weights,
    roundings: float = TERMS,
    steps: int = 4,
    unit: float = FLOAT32,
) -> None:
    """Assert that both moved alike from the weights `since`. In each tensor they may differ by `roundings`
    units in the last place of the tensor's largest move, and by one rounding of each weight in each step."""
    ways = {name: float((one[name].float() - start.float()).abs().max()) for name, start in since.items()}
    assert max(ways.values()) > 0, "no weight has moved"
    for name, way in ways.items():
        allowed = ulps(roundings, of=way, unit=unit) + ulps(steps, unit=unit) * since[name].float().abs()
        excess = (one[name].float() - other[name].float()).abs() / allowed.clamp(min=1e-30)
        assert excess.max() <= 1, f"{name} differs by {excess.max():.2f} times what rounding explains"


def same_metrics(said: Mapping[str, float]) -> Any:
    """Equal to `said` except for rounding: metrics are sums over tokens, or means near 0 of terms up to 1."""
    return pytest.approx(said, rel=ulps(TERMS), abs=ulps(DEPTH))
