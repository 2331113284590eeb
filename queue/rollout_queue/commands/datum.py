"""A datum: one sequence of tokens, the targets that the model is to predict, and numbers for the loss."""

import math

import msgspec

from rollout_queue.contract.errors import InvalidRecord
from rollout_queue.contract.tokens import Logprobs, TokenIds


class Datum(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """N tokens, and K targets for each. Position i of the tokens predicts its targets: the caller has shifted
    them. Raises InvalidRecord if the lengths contradict each other, or a number is not finite."""

    tokens: TokenIds
    """int32 [N]: what the model reads."""
    targets: TokenIds
    """int32 [N * K], position by position."""
    k: int = 1
    """How many targets a position has; more than one are soft targets."""
    numbers: dict[str, Logprobs] = {}
    """float32 [N * K] each, by name: `weights`, `logprobs`, `advantages`, `sequence_ratio_mask`."""

    def __post_init__(self) -> None:
        if self.k < 1 or not self.tokens or len(self.targets) != len(self.tokens) * self.k:
            raise InvalidRecord(
                f"a datum has {len(self.tokens)} tokens and {len(self.targets)} targets of {self.k} each"
            )
        for name, values in self.numbers.items():
            if len(values) != len(self.targets):
                raise InvalidRecord(
                    f"{name}: a datum has {len(values)} values for {len(self.targets)} targets"
                )
            if not values.finite:
                at = next(at for at, value in enumerate(values) if not math.isfinite(value))
                raise InvalidRecord(f"{name}: value {at} is {values[at]}")

    def __len__(self) -> int:
        return len(self.tokens)
