"""The tokens that a teacher finds most probable at the places of trained tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TopTokens:
    """K tokens for each of T trained tokens, the most probable ones of the teacher."""

    ids_TK: NDArray[np.int32]
    lp_TK: NDArray[np.float32]
    """Their log-probabilities under the teacher, in nats."""

    def at(self, chosen_T: NDArray[np.generic]) -> "TopTokens":
        """Those of the chosen trained tokens."""
        return TopTokens(self.ids_TK[chosen_T], self.lp_TK[chosen_T])

    @classmethod
    def joined(cls, parts: Sequence["TopTokens | None"]) -> "TopTokens | None":
        """All of them in order; None if a part is missing."""
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        return cls(
            np.concatenate([part.ids_TK for part in known]), np.concatenate([part.lp_TK for part in known])
        )
