"""Ranks share the tensors of a version by their sizes."""

import pytest

from trainer_service.model.snapshot import shares_of


@pytest.mark.parametrize(
    ("sizes", "keepers", "shares"),
    [
        ([5, 5], 1, [[0, 1]]),
        ([1, 2, 3, 4], 2, [[0, 3], [1, 2]]),
        ([1, 100, 1, 1], 2, [[1], [0, 2, 3]]),
        ([7], 3, [[0], [], []]),
    ],
)
def test_shares_have_about_as_many_bytes_each_and_a_large_tensor_stands_alone(
    sizes: list[int], keepers: int, shares: list[list[int]]
) -> None:
    assert shares_of(sizes, keepers) == shares
