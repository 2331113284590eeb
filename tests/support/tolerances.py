"""Bounds for the difference of two numbers that should be equal except for rounding.

The order in which n terms are added differs between processors. It changes the sum by at most n roundings of
the sum of the terms' absolute values (Higham, Accuracy and Stability of Numerical Algorithms, chapter 4). So
a bound here is the number of roundings, times the unit in the last place, times the size of the terms. Each
test says beside its bound which roundings it counts. `pytest.approx` alone allows 1e-6 of the value: eight
roundings of float32.
"""

FLOAT64 = 2.0**-52
FLOAT32 = 2.0**-23
BFLOAT16 = 2.0**-7
"""The unit in the last place of 1.0; a single rounding is off by half of it at most."""


def ulps(count: float, of: float = 1.0, unit: float = FLOAT32) -> float:
    """The largest error from `count` roundings of numbers no larger than `of`."""
    return count * unit * abs(of)
