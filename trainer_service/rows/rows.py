"""Makes rows of a session's turns, and packs rows into micro-batches.

    turns ─▶ branches ─▶ PlannedRow ─▶ Row (ids, mask 1 where a token is trained)
    Row, Row, Row ─▶ MicroBatch: one sequence whose positions start at 0 again for each row

Each branch becomes one row. A token that several branches share is trained in the first of them only.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout_queue.contract.records import Turn
from trainer_service.rows.turns import Branch, branches

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Experts = NDArray[np.int16]


@dataclass(frozen=True)
class Row:
    """A sequence of L tokens that the model reads, and the data of its trained tokens.

    Raises ValueError if the mask selects the first token: the model predicts a token from those before it.
    """

    session_id: str
    turn_ids: tuple[str, ...]
    """The turns that are trained in this row."""
    advantage: float
    """The advantage of the row's rollout; 0 until it is computed."""
    ids_L: Ints
    mask_L: Ints
    """1 for tokens that the policy sampled and that this row trains, 0 for others."""
    logprobs_L: Floats
    """In nats, as the engine reported them when it sampled the tokens; 0 for tokens that are not trained."""
    versions_L: Ints
    """The version of the weights that sampled each token; -1 for tokens that are not trained."""
    temperatures_L: Floats
    turns_L: Ints
    """The turn of each trained token, numbered from 0 within its branch; -1 for tokens that are not
    trained."""
    rewards_L: Floats
    """The reward of each token. The last token of a trained turn has the turn's rewards; the last trained
    token of the row has those of the session too. Only estimators that give each token its own advantage
    use these rewards."""
    group_id: str = ""
    lp_teacher_L: Floats | None = None
    """The teacher's log-probabilities of the trained tokens, in nats; None without a teacher."""
    experts_LW: Experts | None = None
    """The experts that the engine chose for each token, layer after layer; -1 where they are not known. None:
    they are known for no token."""

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
    """S rows packed into a sequence of N tokens, of which T are trained."""

    ids_N: Ints
    positions_N: Ints
    """The position of each token in its row, from 0."""
    lengths_S: Ints
    """The length of each row, in tokens, in the order of packing."""
    predict_at_T: Ints
    """The index in [0, N) of the token before each trained token: there the model predicts the token."""
    targets_T: Ints
    """The ids of the trained tokens."""
    logprobs_T: Floats
    advantages_T: Floats
    temperatures_T: Floats
    versions_T: Ints
    turns_T: Ints
    """The turn of each trained token, numbered from 0 within its row."""
    rewards_T: Floats
    lp_teacher_T: Floats | None
    rows_T: Ints
    """The row of each trained token, numbered over all rows given to `micro_batches`."""
    experts_NW: Experts | None = None
    """The experts of each token, as in `Row`."""

    def cost(self, even_at: float) -> float:
        """The cost of a pass. The unit is the cost of one token without attention. In a row of `even_at`
        tokens, attention costs as much as everything else."""
        return float((self.lengths_S + self.lengths_S**2 / even_at).sum())

    def single_rows(self) -> tuple["MicroBatch", ...]:
        """One micro-batch for each row."""
        ends_S = self.lengths_S.cumsum()
        return tuple(
            self._cut(int(end - length), int(end)) for length, end in zip(self.lengths_S, ends_S, strict=True)
        )

    def _cut(self, start: int, end: int) -> "MicroBatch":
        in_T = (start <= self.predict_at_T) & (self.predict_at_T < end)
        return MicroBatch(
            ids_N=self.ids_N[start:end],
            positions_N=self.positions_N[start:end],
            lengths_S=np.array([end - start]),
            predict_at_T=self.predict_at_T[in_T] - start,
            targets_T=self.targets_T[in_T],
            logprobs_T=self.logprobs_T[in_T],
            advantages_T=self.advantages_T[in_T],
            temperatures_T=self.temperatures_T[in_T],
            versions_T=self.versions_T[in_T],
            turns_T=self.turns_T[in_T],
            rewards_T=self.rewards_T[in_T],
            lp_teacher_T=None if self.lp_teacher_T is None else self.lp_teacher_T[in_T],
            rows_T=self.rows_T[in_T],
            experts_NW=None if self.experts_NW is None else self.experts_NW[start:end],
        )


@dataclass(frozen=True)
class PlannedRow:
    """A row that takes no memory yet. Groups may wait for their step for long."""

    session_id: str
    branch: Branch
    turn_ids: tuple[str, ...]
    """The turns that are trained in this row."""
    rewards: Mapping[str | None, float]
    group_id: str

    def __len__(self) -> int:
        return sum(len(turn.context_ids) + len(turn.output_ids) for turn in self.branch)

    def row(self) -> Row:
        length = len(self)
        ids_L, mask_L = np.empty(length, np.int64), np.zeros(length, np.int64)
        logprobs_L, rewards_L = np.zeros(length, np.float32), np.zeros(length, np.float32)
        versions_L, turns_L = np.full(length, -1), np.full(length, -1)
        temperatures_L = np.empty(length, np.float32)
        experts_LW = _no_experts(self.branch, length)
        end = 0
        for number, turn in enumerate(self.branch):
            begin, start = end, end + len(turn.context_ids)
            end = start + len(turn.output_ids)
            ids_L[begin:start], ids_L[start:end] = turn.context_ids, turn.output_ids
            temperatures_L[begin:end] = temperature_of(turn)
            if experts_LW is not None and turn.experts is not None:
                numbers = np.frombuffer(turn.experts.packed, f"<u{turn.experts.item_bytes}")
                experts_LW[end - 1 - turn.experts.rows : end - 1] = numbers.reshape(turn.experts.rows, -1)
            if turn.turn_id in self.turn_ids:
                mask_L[start:end], turns_L[start:end] = 1, number
                logprobs_L[start:end] = turn.logprobs
                counts = [span.end - span.start for span in turn.versions]
                versions_L[start:end] = np.repeat([span.version for span in turn.versions], counts)
                rewards_L[end - 1] = self.rewards.get(turn.turn_id, 0.0)
        rewards_L[np.flatnonzero(mask_L)[-1]] += self.rewards.get(None, 0.0)
        return Row(
            session_id=self.session_id,
            turn_ids=self.turn_ids,
            advantage=0.0,
            ids_L=ids_L,
            mask_L=mask_L,
            logprobs_L=logprobs_L,
            versions_L=versions_L,
            temperatures_L=temperatures_L,
            turns_L=turns_L,
            rewards_L=rewards_L,
            group_id=self.group_id,
            experts_LW=experts_LW,
        )


def planned_rows(
    session_id: str,
    turns: Sequence[Turn],
    trainable: Iterable[str],
    rewards: Mapping[str | None, float] | None = None,
    group_id: str = "",
) -> tuple[PlannedRow, ...]:
    """The rows that train each turn of `trainable` (turn ids) exactly once.

    `rewards` maps each turn id to the sum of the turn's rewards, and None to the sum of the session's own.
    """
    left = set(trainable)
    rows = []
    for branch in branches(turns, frozenset(left)):
        trained = tuple(turn.turn_id for turn in branch if turn.turn_id in left and turn.output_ids)
        left.difference_update(trained)
        if trained:
            rows.append(PlannedRow(session_id, branch, trained, rewards or {}, group_id))
    return tuple(rows)


def micro_batches(rows: Sequence[Row], max_tokens: int) -> Iterator[MicroBatch]:
    """Packs whole rows into few micro-batches of at most `max_tokens` tokens. A longer row stands alone."""
    return (_pack(rows, pack) for pack in packs_of(rows, max_tokens))


def packs_of(rows: Sequence[Row] | Sequence[PlannedRow], max_tokens: int) -> list[list[int]]:
    """The indices of the rows of each micro-batch.

    First fit decreasing: each row, the longest first, goes into the first pack with enough room. Rows of
    equal length keep their order, so equal rows always make equal packs."""
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
    return packs


def balanced_shares(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Distributes micro-batches so that all ranks have nearly equal sums of `costs`. Returns the indices of
    each rank's micro-batches, the costliest first. No rank has two micro-batches more than another."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    order = sorted(range(len(costs)), key=lambda index: -costs[index])
    for start in range(0, len(order), ranks):
        # Each rank gets one micro-batch of this slice. The rank with the smallest sum gets the costliest.
        lightest = sorted(shares, key=lambda share: sum(costs[index] for index in share))
        for share, index in zip(lightest, order[start : start + ranks], strict=False):
            share.append(index)
    return shares


def temperature_of(turn: Turn) -> float:
    """The temperature at which the engine computed the turn's log-probabilities. At sampling temperature 0,
    the engine takes the most likely token and reports log-probabilities at temperature 1."""
    temperature = float(turn.sampling.used.get("temperature", 1.0))
    return temperature if temperature > 0 else 1.0


def _no_experts(branch: Branch, length: int) -> Experts | None:
    """The experts of a row before they are filled in; None if none of its turns has any."""
    width = max((0 if turn.experts is None else turn.experts.width for turn in branch), default=0)
    return np.full((length, width), -1, np.int16) if width else None


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
        lp_teacher_T=_teacher_logprobs(rows, at_T),
        rows_T=rows_N[at_T],
        experts_NW=_experts(rows),
    )


def _experts(rows: Sequence[Row]) -> Experts | None:
    width = max(0 if row.experts_LW is None else row.experts_LW.shape[1] for row in rows)
    if not width:
        return None
    return np.concatenate(
        [
            np.full((len(row), width), -1, np.int16) if row.experts_LW is None else row.experts_LW
            for row in rows
        ]
    )


def _teacher_logprobs(rows: Sequence[Row], at_T: Ints) -> Floats | None:
    known = [row.lp_teacher_L for row in rows if row.lp_teacher_L is not None]
    return np.concatenate(known)[at_T] if len(known) == len(rows) else None
