"""Whether two trainings did the same: their weights went the same way, and their metrics agree."""

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from tests.support.tolerances import FLOAT32, ulps

Weights = Mapping[str, Tensor]

WELL_CONDITIONED: dict[str, Any] = {"lr": 0.1, "warmup_steps": 0, "max_grad_norm": 1e-8}
"""Gradients are clipped to the size of AdamW's epsilon, 1e-8.

AdamW moves a weight by lr · m / (√v + 1e-8). Where the gradient of a weight is nearly 0, and much larger than
1e-8 all the same, this turns the rounding of the gradient into a whole step of size lr, and no bound follows.
With no gradient above 1e-8 a step is almost that of plain gradient descent: it changes by at most twice as
much as the gradient does. A wrong scale shows in the norm that is reported before clipping, and in how far
the weights go where it is clipped by a wrong norm.
"""
TERMS = 512
"""A gradient of these tests is a sum over the tokens of a step, at most 12 rows of 38."""
DEPTH = 32
"""How often a metric is rounded that is near 0: torch adds 512 terms pairwise, in 9 layers, and each term
comes out of a forward pass with its last bits wrong."""


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
    """Both went the same way from the weights `since`, tensor by tensor, but for `roundings` of the gradient
    (so many units in the last place of the longest way of any weight in the tensor) and one rounding of the
    weight itself in each step."""
    ways = {name: float((one[name].float() - start.float()).abs().max()) for name, start in since.items()}
    assert max(ways.values()) > 0, "no weight has moved"
    for name, way in ways.items():
        allowed = ulps(roundings, of=way, unit=unit) + ulps(steps, unit=unit) * since[name].float().abs()
        excess = (one[name].float() - other[name].float()).abs() / allowed.clamp(min=1e-30)
        assert excess.max() <= 1, f"{name} differs by {excess.max():.2f} times what rounding explains"


def same_metrics(said: Mapping[str, float]) -> Any:
    """Equal to `said` but for rounding: they are sums over tokens, or means near 0 of terms up to 1."""
    return pytest.approx(said, rel=ulps(TERMS), abs=ulps(DEPTH))
