"""Checks the indices of sparse tensors (CSR: compressed rows)."""

from collections.abc import Sequence
from itertools import pairwise


def is_csr(begins: Sequence[float], columns: Sequence[float], listed: int, shape: tuple[int, int]) -> bool:
    """Whether `begins` (of each row, and the end) and `columns` describe `listed` values of a matrix."""
    return (
        len(begins) == shape[0] + 1
        and begins[0] == 0
        and begins[-1] == listed == len(columns)
        and all(one <= other for one, other in pairwise(begins))
        and all(0 <= column < shape[1] for column in columns)
    )
