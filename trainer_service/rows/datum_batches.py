"""Packs the datums of a user's own loop into micro-batches, as rows of turns are packed.

Datum ─▶ DatumRow ─ packs_of ─▶ MicroBatch: every position predicts its targets ─▶ log p ─ places_of ─▶ datums

Position i of a datum predicts the targets i, which need not be its token i + 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer_service.rows.packing import Pack, layout_of, packs_of
from trainer_service.rows.rows import Floats, Ints, MicroBatch
from trainer_service.rows.top_tokens import TopTokens


@dataclass(frozen=True)
class DatumRow:
    """N tokens that the model reads, K targets for each, and the numbers of the loss."""

    ids_N: Ints
    targets_NK: Ints
    numbers: Mapping[str, Floats]
    """[N, K] each, by name."""

    def __len__(self) -> int:
        return len(self.ids_N)


def datum_batches(
    rows: Sequence[DatumRow], max_tokens: int, share_prefixes: bool = False
) -> Iterator[MicroBatch]:
    """Packs the rows, which have equally many targets for each position, as `micro_batches` does. The first
    targets are the tokens that are trained; the others are `teacher_top`. All temperatures are 1."""
    packs = packs_of([row.ids_N for row in rows], max_tokens, share_prefixes)
    return (_packed(rows, pack) for pack in packs)


def places_of(batch: MicroBatch, lengths_R: Ints) -> Ints:
    """[T]: where each trained token of the micro-batch is among the positions of all datums, one datum after
    the other. `lengths_R` has the length of each datum."""
    starts_R = lengths_R.cumsum() - lengths_R
    places_T: Ints = starts_R[batch.rows_T] + batch.positions_N[batch.predict_at_T]
    return places_T


def _packed(of_command: Sequence[DatumRow], pack: Pack) -> MicroBatch:
    layout = layout_of([row.ids_N for row in of_command], pack)
    rows = [of_command[row] for row in layout.places]
    targets_TK = np.concatenate([row.targets_NK for row in rows])
    none_T, zero_T = np.zeros(len(targets_TK), np.int64), np.zeros(len(targets_TK), np.float32)
    others_TK = targets_TK[:, 1:]
    return MicroBatch(
        ids_N=layout.ids_N,
        positions_N=layout.positions_N,
        lengths_S=layout.lengths_S,
        parents_S=layout.parents_S,
        predict_at_T=np.concatenate(list(layout.places.values())),
        targets_T=targets_TK[:, 0],
        logprobs_T=zero_T,
        advantages_T=zero_T,
        temperatures_T=np.ones(len(targets_TK), np.float32),
        versions_T=none_T,
        turns_T=none_T,
        rewards_T=zero_T,
        lp_teacher_T=None,
        rows_T=np.repeat(np.array(list(layout.places)), [len(row) for row in rows]),
        teacher_top=TopTokens(others_TK, np.zeros(others_TK.shape, np.float32)) if others_TK.size else None,
    )
