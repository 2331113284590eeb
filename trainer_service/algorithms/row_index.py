"""Computes sums, means and maxima over the tokens of each row, and copies a row's value to its tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowIndex:
    """The R rows of T tokens. Row numbers may have gaps, and may come in any order."""

    of_T: Tensor
    """The index of each token's row, in [0, R); int64."""
    lengths_R: Tensor

    @classmethod
    def of(cls, rows_T: Tensor) -> "RowIndex":
        _, of_T, lengths_R = torch.unique(rows_T, return_inverse=True, return_counts=True)
        return cls(of_T, lengths_R)

    def sum(self, values_T: Tensor) -> Tensor:
        return values_T.new_zeros(len(self.lengths_R)).index_add(0, self.of_T, values_T)

    def mean(self, values_T: Tensor) -> Tensor:
        return self.sum(values_T) / self.lengths_R

    def largest(self, values_T: Tensor) -> Tensor:
        some_R = values_T.new_empty(len(self.lengths_R))  # each row has a token, so no value of it stays
        return some_R.scatter_reduce(0, self.of_T, values_T, "amax", include_self=False)

    def any(self, flags_T: Tensor) -> Tensor:
        found_R: Tensor = self.sum(flags_T.to(torch.int64)) > 0
        return found_R

    def at_tokens(self, values_R: Tensor) -> Tensor:
        """[T]: the value of each token's row."""
        return values_R[self.of_T]
