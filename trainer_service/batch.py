"""From rollouts to rows, and from rows to packed micro-batches.

    rollout ─▶ branches ─▶ Row (ids, mask 1 where a token is trained)
    Row, Row, Row ─▶ MicroBatch: one long sequence whose positions start at 0 again for each row

A branch becomes one row; a token that several branches share is trained in the first of them alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout_queue.records import Turn
from trainer_service.turns import Branch, branches

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Row:
    """One sequence of L tokens as the model sees it, with what is known of those that are trained."""

    session_id: str
    turn_ids: tuple[str, ...]
    """The turns that are trained in this row."""
    advantage: float
    ids_L: Ints
    mask_L: Ints
    """1 on tokens that the policy sampled and that this row trains."""
    logprobs_L: Floats
    """What the engine said when it sampled them; 0 elsewhere."""
    versions_L: Ints
    temperatures_L: Floats

    def __post_init__(self) -> None:
        if self.mask_L[0]:
            raise ValueError(f"session {self.session_id}: nothing predicts the first token of a row")

    def __len__(self) -> int:
        return len(self.ids_L)


@dataclass(frozen=True)
class MicroBatch:
    """Rows packed into N tokens, of which T are trained."""

    ids_N: Ints
    positions_N: Ints
    """0 at the start of each row: the model keeps rows apart by it."""
    predict_at_T: Ints
    """Where the model predicts each trained token: one place before it."""
    targets_T: Ints
    logprobs_T: Floats
    advantages_T: Floats
    temperatures_T: Floats
    versions_T: Ints
    rows_T: Ints
    """Which row, counted over the whole step, a trained token belongs to."""


def rows_of(
    session_id: str, turns: Sequence[Turn], trainable: Iterable[str], advantage: float
) -> tuple[Row, ...]:
    """The rows that train each trainable turn of a session exactly once."""
    left = set(trainable)
    rows = []
    for branch in branches(turns, frozenset(left)):
        trained = tuple(turn.turn_id for turn in branch if turn.turn_id in left and turn.output_ids)
        left.difference_update(trained)
        if trained:
            rows.append(_row(session_id, branch, trained, advantage))
    return tuple(rows)


def micro_batches(rows: Sequence[Row], max_tokens: int) -> Iterator[MicroBatch]:
    """Rows in their order, as many together as `max_tokens` allows; a longer row stands alone."""
    start, tokens = 0, 0
    for index, row in enumerate(rows):
        if index > start and tokens + len(row) > max_tokens:
            yield _pack(rows[start:index], start)
            start, tokens = index, 0
        tokens += len(row)
    if rows:
        yield _pack(rows[start:], start)


def _row(session_id: str, branch: Branch, trained: tuple[str, ...], advantage: float) -> Row:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    temperatures: list[float] = []
    for turn in branch:
        context = len(turn.context_ids)
        ids += turn.context_ids
        ids += turn.output_ids
        mask += [0] * context + [int(turn.turn_id in trained)] * len(turn.output_ids)
        logprobs += [0.0] * context
        logprobs += turn.logprobs
        versions += [-1] * context
        for span in turn.versions:
            versions += [span.version] * (span.end - span.start)
        temperatures += [temperature_of(turn)] * (context + len(turn.output_ids))
    mask_L = np.array(mask, np.int64)
    return Row(
        session_id=session_id,
        turn_ids=trained,
        advantage=advantage,
        ids_L=np.array(ids, np.int64),
        mask_L=mask_L,
        logprobs_L=np.array(logprobs, np.float32) * mask_L.astype(np.float32),
        versions_L=np.where(mask_L == 1, np.array(versions, np.int64), -1),
        temperatures_L=np.array(temperatures, np.float32),
    )


def temperature_of(turn: Turn) -> float:
    """The temperature that the logprobs are of. The engine turns 0 into its most likely token, and says
    the logprobs of temperature 1."""
    temperature = float(turn.sampling.used.get("temperature", 1.0))
    return temperature if temperature > 0 else 1.0


def _pack(rows: Sequence[Row], first_row: int) -> MicroBatch:
    mask_N = np.concatenate([row.mask_L for row in rows]) == 1
    lengths = [len(row) for row in rows]
    ids_N = np.concatenate([row.ids_L for row in rows])
    at_T = np.flatnonzero(mask_N)
    rows_N = np.repeat(np.arange(first_row, first_row + len(rows)), lengths)
    advantages_N = np.repeat(np.array([row.advantage for row in rows], np.float32), lengths)
    return MicroBatch(
        ids_N=ids_N,
        positions_N=np.concatenate([np.arange(length) for length in lengths]),
        predict_at_T=at_T - 1,
        targets_T=ids_N[at_T],
        logprobs_T=np.concatenate([row.logprobs_L for row in rows])[at_T],
        advantages_T=advantages_N[at_T],
        temperatures_T=np.concatenate([row.temperatures_L for row in rows])[at_T],
        versions_T=np.concatenate([row.versions_L for row in rows])[at_T],
        rows_T=rows_N[at_T],
    )
