"""From rollouts to rows, and from rows to packed micro-batches.

    rollout ─▶ branches ─▶ Row (ids, mask 1 where a token is trained)
    Row, Row, Row ─▶ MicroBatch: one long sequence whose positions start at 0 again for each row

A branch becomes one row; a token that several branches share is trained in the first of them alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_queue.contract.records import Turn
from trainer_service.rows.turns import Branch, branches

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Row:
    """One sequence of L tokens as the model sees it, with what is known of those that are trained."""

    session_id: str
    turn_ids: tuple[str, ...]
    """The turns that are trained in this row."""
    advantage: float
    """Of its rollout; 0 until the step that trains it is scored."""
    ids_L: Ints
    mask_L: Ints
    """1 on tokens that the policy sampled and that this row trains."""
    logprobs_L: Floats
    """What the engine said when it sampled them; 0 elsewhere."""
    versions_L: Ints
    temperatures_L: Floats
    turns_L: Ints
    """Which turn of its session a trained token belongs to, counted from 0; -1 elsewhere."""
    rewards_L: Floats
    """What is credited to a token as such: a turn's own rewards on its last token, all others of the session
    on the row's. Only estimators that give each token its own advantage look at it."""
    group_id: str = ""
    teacher_L: Floats | None = None
    """What a teacher says of the trained tokens, where one judges them."""

    def __post_init__(self) -> None:
        if self.mask_L[0]:
            raise ValueError(f"session {self.session_id}: nothing predicts the first token of a row")

    def __len__(self) -> int:
        return len(self.ids_L)

    @property
    def trained_tokens(self) -> int:
        return int(self.mask_L.sum())


@dataclass(frozen=True)
class MicroBatch:
    """Rows packed into N tokens, of which T are trained."""

    ids_N: Ints
    positions_N: Ints
    """0 at the start of each row."""
    lengths_S: Ints
    """Of each row, in the order of the pack."""
    predict_at_T: Ints
    """Where the model predicts each trained token: one place before it."""
    targets_T: Ints
    logprobs_T: Floats
    advantages_T: Floats
    temperatures_T: Floats
    versions_T: Ints
    turns_T: Ints
    """Which turn of its row a trained token belongs to."""
    rewards_T: Floats
    teacher_T: Floats | None
    rows_T: Ints
    """Which row, counted over all that were packed together, a trained token belongs to."""

    def cost(self, even_at: float) -> float:
        """What a pass over it takes, in tokens: attention costs as much as all else in a row of `even_at`."""
        return float((self.lengths_S + self.lengths_S**2 / even_at).sum())

    def apart(self) -> tuple["MicroBatch", ...]:
        """A micro-batch for each row."""
        ends_S = self.lengths_S.cumsum()
        return tuple(
            self._cut(int(end - length), int(end)) for length, end in zip(self.lengths_S, ends_S, strict=True)
        )

    def _cut(self, start: int, end: int) -> "MicroBatch":
        in_T = (start <= self.predict_at_T) & (self.predict_at_T < end)
        of_row: dict[str, Any] = {
            "ids_N": self.ids_N[start:end],
            "positions_N": self.positions_N[start:end],
            "lengths_S": np.array([end - start]),
            "predict_at_T": self.predict_at_T[in_T] - start,
        }
        of_tokens: dict[str, Any] = {
            name: None if values is None else values[in_T]
            for name, values in vars(self).items()
            if name.endswith("_T")
        }
        return MicroBatch(**of_tokens | of_row)


def rows_of(
    session_id: str,
    turns: Sequence[Turn],
    trainable: Iterable[str],
    rewards: Mapping[str | None, float] | None = None,
    group_id: str = "",
) -> tuple[Row, ...]:
    """The rows that train each trainable turn of a session exactly once.

    `rewards` are those of turns by id, and of the session as a whole under None.
    """
    left = set(trainable)
    rows = []
    for branch in branches(turns, frozenset(left)):
        trained = tuple(turn.turn_id for turn in branch if turn.turn_id in left and turn.output_ids)
        left.difference_update(trained)
        if trained:
            rows.append(_row(session_id, branch, trained, rewards or {}, group_id))
    return tuple(rows)


def micro_batches(rows: Sequence[Row], max_tokens: int) -> Iterator[MicroBatch]:
    """As few packs of whole rows as `max_tokens` allows, nearly; a longer row stands alone.

    First fit decreasing: each row, the longest first, goes into the first pack that has room. Rows of one
    length keep their order, so the same rows always make the same packs.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: -len(rows[index])):
        length = len(rows[index])
        place = next((place for place, left in enumerate(room) if length <= left), len(packs))
        if place == len(packs):
            packs.append([])
            room.append(max_tokens)
        packs[place].append(index)
        room[place] -= length
    return (_pack(rows, pack) for pack in packs)


def shared_out(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which micro-batches each rank takes, by their costs: nearly the same work, the costliest first, and no
    rank more than one fewer than another."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    order = sorted(range(len(costs)), key=lambda index: -costs[index])
    for start in range(0, len(order), ranks):
        # One for each rank, the costliest of them for whoever has the least to do.
        free = sorted(shares, key=lambda share: sum(costs[index] for index in share))
        for share, index in zip(free, order[start : start + ranks], strict=False):
            share.append(index)
    return shares


def _row(
    session_id: str,
    branch: Branch,
    trained: tuple[str, ...],
    rewards: Mapping[str | None, float],
    group_id: str,
) -> Row:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    temperatures: list[float] = []
    turn_numbers: list[int] = []
    credited: list[float] = []
    for number, turn in enumerate(branch):
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
        turn_numbers += [-1] * context + [number] * len(turn.output_ids)
        credited += [0.0] * (context + len(turn.output_ids))
        if turn.turn_id in trained:
            credited[-1] = rewards.get(turn.turn_id, 0.0)
    mask_L = np.array(mask, np.int64)
    rewards_L = np.array(credited, np.float32)
    rewards_L[np.flatnonzero(mask_L)[-1]] += rewards.get(None, 0.0)
    return Row(
        session_id=session_id,
        turn_ids=trained,
        advantage=0.0,
        ids_L=np.array(ids, np.int64),
        mask_L=mask_L,
        logprobs_L=np.array(logprobs, np.float32) * mask_L.astype(np.float32),
        versions_L=np.where(mask_L == 1, np.array(versions, np.int64), -1),
        temperatures_L=np.array(temperatures, np.float32),
        turns_L=np.where(mask_L == 1, np.array(turn_numbers, np.int64), -1),
        rewards_L=rewards_L,
        group_id=group_id,
    )


def temperature_of(turn: Turn) -> float:
    """The temperature that the logprobs are of. The engine turns 0 into its most likely token, and says
    the logprobs of temperature 1."""
    temperature = float(turn.sampling.used.get("temperature", 1.0))
    return temperature if temperature > 0 else 1.0


def _pack(of_step: Sequence[Row], indices: Sequence[int]) -> MicroBatch:
    rows = [of_step[index] for index in indices]
    mask_N = np.concatenate([row.mask_L for row in rows]) == 1
    lengths_S = np.array([len(row) for row in rows])
    ids_N = np.concatenate([row.ids_L for row in rows])
    at_T = np.flatnonzero(mask_N)
    rows_N = np.repeat(np.array(indices), lengths_S)
    advantages_N = np.repeat(np.array([row.advantage for row in rows], np.float32), lengths_S)
    return MicroBatch(
        ids_N=ids_N,
        positions_N=np.concatenate([np.arange(length) for length in lengths_S]),
        lengths_S=lengths_S,
        predict_at_T=at_T - 1,
        targets_T=ids_N[at_T],
        logprobs_T=np.concatenate([row.logprobs_L for row in rows])[at_T],
        advantages_T=advantages_N[at_T],
        temperatures_T=np.concatenate([row.temperatures_L for row in rows])[at_T],
        versions_T=np.concatenate([row.versions_L for row in rows])[at_T],
        turns_T=np.concatenate([row.turns_L for row in rows])[at_T],
        rewards_T=np.concatenate([row.rewards_L for row in rows])[at_T],
        teacher_T=_judged(rows, at_T),
        rows_T=rows_N[at_T],
    )


def _judged(rows: Sequence[Row], at_T: Ints) -> Floats | None:
    told = [row.teacher_L for row in rows if row.teacher_L is not None]
    return np.concatenate(told)[at_T] if len(told) == len(rows) else None
