"""What a step used of each trained token, as one record for each turn: `TrainedTokens`.

micro-batch ─ LearnedTokens ─▶ the rank's own turns ─ turn_records ─▶ TurnRecord, … of all ranks
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rollout_queue.contract.turn_parts.trained_tokens import TrainedTokens
from trainer_service.rows.rows import Ints, Row

LARGEST = float(np.finfo(np.float16).max)


class LearnedTokens(NamedTuple):
    """The T trained tokens of a micro-batch, row after row. Tensors may be on the device."""

    rows_T: Ints
    """The row of each token, numbered over all rows of the step."""
    turns_T: Ints
    """The turn of each token, numbered within the row's branch."""
    advantages_T: Tensor | None
    """float32, as the loss has used them; None if it uses none."""
    log_rho_T: Tensor | None
    """Log-probability under the weights before the step minus the engine's, in nats."""


class TurnRecord(NamedTuple):
    """The packed `TrainedTokens` of one turn."""

    session_id: str
    turn_id: str
    packed: bytes


def turn_records(learned: LearnedTokens, rows: Sequence[Row]) -> Iterator[TurnRecord]:
    """The records of the turns in a micro-batch. `rows` are all rows of the step."""
    if not len(learned.rows_T):
        return
    advantages_T = None if learned.advantages_T is None else learned.advantages_T.float().cpu().numpy()
    ratios_T = None
    if learned.log_rho_T is not None:
        ratios_T = np.exp(np.minimum(learned.log_rho_T.float().cpu().numpy(), np.log(LARGEST)))
    changes_T = (np.diff(learned.rows_T) != 0) | (np.diff(learned.turns_T) != 0)
    ends = [0, *(np.flatnonzero(changes_T) + 1).tolist(), len(learned.rows_T)]
    before, place = -1, 0
    for start, end in pairwise(ends):
        number = int(learned.rows_T[start])
        place = place + 1 if number == before else 0
        before, row = number, rows[number]
        packed_advantages = packed_ratios = None
        if advantages_T is not None:
            own_T = advantages_T[start:end]
            packed_advantages = (own_T[:1] if (own_T == own_T[0]).all() else own_T).astype("<f4").tobytes()
        if ratios_T is not None:
            packed_ratios = ratios_T[start:end].astype("<f2").tobytes()
        tokens = TrainedTokens(end - start, packed_advantages, packed_ratios)
        yield TurnRecord(row.session_id, row.turn_ids[place], tokens.pack())
