"""Makes rows of a session's turns, and packs rows into micro-batches.

    turns ─▶ branches ─▶ PlannedRow ─▶ Row (ids, mask 1 where a token is trained)
    Row, Row, Row ─▶ MicroBatch: one sequence of segments; positions start at 0 again where a row begins

    root ─ a ─ b          branches(…) ─▶ (root a b), (root c)
         └ c              b and c are the tips: no trainable turn continues them

Each branch becomes one row. A token that several branches share is trained in the first of them only.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_queue.contract.outcomes import exclusion, orphans_of
from rollout_queue.contract.records import Turn, Verdict, temperature_of_logprobs
from trainer_service.rows.packing import Pack, layout_of, packs_of
from trainer_service.rows.row_images import ImageRule, RowImage, in_pack, row_images, within


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


Branch = tuple[Turn, ...]
"""As `TrainedBranch.turns`."""


def exclusions(turns: Sequence[Turn]) -> Mapping[str, Verdict]:
    """The verdicts of the turns that must not be trained, by turn id."""
    orphans = orphans_of(turns)
    found = {turn.turn_id: exclusion(turn, orphans) for turn in turns}
    return {turn_id: verdict for turn_id, verdict in found.items() if verdict is not None}


def branches(turns: Sequence[Turn], trainable: Collection[str]) -> list[Branch]:
    """The branches that together contain every turn of `trainable` (turn ids), sorted by the age of their
    tips, oldest first. No branch is a part of another."""
    by_id = {turn.turn_id: turn for turn in turns}
    inner: set[str] = set()
    for turn in turns:
        if turn.turn_id in trainable:
            inner.update(ancestor.turn_id for ancestor in _branch(turn, by_id)[:-1])
    tips = [turn for turn in turns if turn.turn_id in trainable and turn.turn_id not in inner]
    # The id breaks ties, so that equal times always give the same order.
    return [_branch(tip, by_id) for tip in sorted(tips, key=attrgetter("started_at", "turn_id"))]


def contradiction(turns: Sequence[Turn], vocab_size: int, images: ImageRule | None = None) -> str | None:
    """The reason why the tree of turns cannot be trained; None if it can. Without a rule of `images`, turns
    that show images cannot."""
    by_id = {turn.turn_id: turn for turn in turns}
    for turn in turns:
        if turn.parent_id is not None and turn.parent_id not in by_id:
            return f"turn {turn.turn_id} continues turn {turn.parent_id}, which is not in the stream"
        if images is None and turn.images:
            return f"turn {turn.turn_id} shows images, which this trainer does not train"
        if images is not None and (broken := images.complaint(turn)):
            return broken
        if turn.parent_id is None and not turn.context_ids:
            return f"turn {turn.turn_id} has no prompt"
        largest = max([*turn.context_ids, *turn.output_ids], default=0)
        if largest >= vocab_size:
            return f"turn {turn.turn_id} has token id {largest} of a vocabulary of {vocab_size}"
        if _circular(turn, by_id):
            return f"turn {turn.turn_id} is its own ancestor"
    return None


def _branch(tip: Turn, by_id: Mapping[str, Turn]) -> Branch:
    branch = [tip]
    while branch[-1].parent_id is not None:
        branch.append(by_id[branch[-1].parent_id])
    return tuple(reversed(branch))


def _circular(turn: Turn, by_id: Mapping[str, Turn]) -> bool:
    seen: set[str] = set()
    ancestor: Turn | None = turn
    while ancestor is not None:
        if ancestor.turn_id in seen:
            return True
        seen.add(ancestor.turn_id)
        ancestor = by_id.get(ancestor.parent_id) if ancestor.parent_id is not None else None
    return False


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
    teacher_top: TopTokens | None = None
    experts_LW: Experts | None = None
    """The experts that the engine chose for each token, layer after layer; -1 where they are not known. None:
    they are known for no token."""
    images: tuple[RowImage, ...] = ()
    """In the order of their places."""

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
    """Rows packed into a sequence of N tokens in S segments. T tokens are trained, row after row. Without
    shared prefixes, each row is a segment."""

    ids_N: Ints
    positions_N: Ints
    """The position of each token in its row, from 0."""
    lengths_S: Ints
    """The length of each segment, in tokens, in the order of packing."""
    parents_S: Ints
    """The number of the segment that each segment continues; -1 if it begins a row."""
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
    teacher_top: TopTokens | None = None
    images: tuple[RowImage, ...] = ()
    """Those of all rows, in the order of their places among the N tokens."""

    def cost(self, even_at: float) -> float:
        """The cost of a pass. The unit is the cost of one token without attention. In a row of `even_at`
        tokens, attention costs as much as everything else."""
        before_S = self.positions_N[self.lengths_S.cumsum() - self.lengths_S]
        pairs_S = self.lengths_S**2 + 2 * self.lengths_S * before_S
        return float((self.lengths_S + pairs_S / even_at).sum())

    def single_rows(self) -> tuple["MicroBatch", ...]:
        """One micro-batch for each row. The rows must share no prefixes."""
        assert (self.parents_S == -1).all()  # noqa: S101 - only a policy that can share them asks for shared ones
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
            parents_S=np.array([-1]),
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
            teacher_top=None if self.teacher_top is None else self.teacher_top.at(in_T),
            images=within(self.images, start, end),
        )


@dataclass(frozen=True)
class PlannedRow:
    """What becomes a Row. It takes no memory yet: groups may wait for their step for long."""

    session_id: str
    branch: Branch
    turn_ids: tuple[str, ...]
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
            temperatures_L[begin:end] = temperature_of_logprobs(turn.sampling.used)
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
            images=row_images(self.branch),
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


def micro_batches(rows: Sequence[Row], max_tokens: int, share_prefixes: bool = False) -> Iterator[MicroBatch]:
    """Packs whole rows into few micro-batches of at most `max_tokens` tokens. A longer row stands alone. With
    `share_prefixes`, a prefix that rows of a micro-batch have in common is in it once. Rows with images share
    none: equal ids may stand for other images."""
    share_prefixes = share_prefixes and not any(row.images for row in rows)
    packs = packs_of([row.ids_L for row in rows], max_tokens, share_prefixes)
    return (_packed(rows, pack) for pack in packs)


def balanced_shares(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Distributes micro-batches so that all ranks have nearly equal sums of `costs`. Returns the indices of
    each rank's micro-batches, the costliest first. No rank has two micro-batches more than another."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    for start in range(0, len(order), ranks):
        # Each rank gets one micro-batch of this slice. The rank with the smallest sum gets the costliest.
        lightest = sorted(shares, key=lambda share: sum(costs[index] for index in share))
        for share, index in zip(lightest, order[start : start + ranks], strict=False):
            share.append(index)
    return shares


def _no_experts(branch: Branch, length: int) -> Experts | None:
    """The experts of a row before they are filled in; None if none of its turns has any."""
    width = max((0 if turn.experts is None else turn.experts.width for turn in branch), default=0)
    return np.full((length, width), -1, np.int16) if width else None


def _packed(of_step: Sequence[Row], pack: Pack) -> MicroBatch:
    layout = layout_of([row.ids_L for row in of_step], pack)
    rows = [of_step[row] for row in layout.places]
    at_T = np.flatnonzero(np.concatenate([row.mask_L for row in rows]))
    lengths_R = np.array([len(row) for row in rows])

    def trained(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(row, name) for row in rows])[at_T]

    return MicroBatch(
        ids_N=layout.ids_N,
        positions_N=layout.positions_N,
        lengths_S=layout.lengths_S,
        parents_S=layout.parents_S,
        predict_at_T=np.concatenate(list(layout.places.values()))[at_T - 1],
        targets_T=trained("ids_L"),
        logprobs_T=trained("logprobs_L"),
        advantages_T=np.repeat(np.array([row.advantage for row in rows], np.float32), lengths_R)[at_T],
        temperatures_T=trained("temperatures_L"),
        versions_T=trained("versions_L"),
        turns_T=trained("turns_L"),
        rewards_T=trained("rewards_L"),
        lp_teacher_T=None if any(row.lp_teacher_L is None for row in rows) else trained("lp_teacher_L"),
        rows_T=np.repeat(np.array(list(layout.places)), lengths_R)[at_T],
        experts_NW=_experts(rows),
        teacher_top=TopTokens.joined([row.teacher_top for row in rows]),
        images=in_pack([row.images for row in rows], [int(at_L[0]) for at_L in layout.places.values()]),
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


def shortest() -> MicroBatch:
    """For a pass that is made only for what it does to the accumulated gradient."""
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    zero = np.zeros(1, np.float32)
    return MicroBatch(
        ids_N=np.zeros(2, np.int64),
        positions_N=np.arange(2),
        lengths_S=2 * one,
        parents_S=-one,
        predict_at_T=none,
        targets_T=none,
        logprobs_T=zero,
        advantages_T=zero,
        temperatures_T=np.ones(1, np.float32),
        versions_T=none,
        turns_T=none,
        rewards_T=zero,
        lp_teacher_T=None,
        rows_T=none,
    )
