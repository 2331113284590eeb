"""Decides which rows go into one micro-batch. A prefix that rows of it share is there once.

rows ─ sorted by their ids ─▶ PrefixTree, … ─ first fit decreasing ─▶ packs

system prompt ─┬─ task ─┬─ answer      A tree of segments. Each row is a path from a root to a segment;
               │        └─ answer      a row that shares no prefix is a tree of one segment.
               └─ task ── answer
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

FEWEST_SHARED = 32
"""A prefix of fewer tokens is computed again: it would cost more to attend to it from several segments."""


@dataclass(eq=False)
class Segment:
    """The tokens `start` to `end` of a row, which continue those of the parent."""

    row: int
    start: int
    end: int
    parent: "Segment | None"

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def path(self) -> list["Segment"]:
        """The segments from the root to this one."""
        path = [self]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]


@dataclass
class PrefixTree:
    """Rows as segments. Rows must be added in the order of their ids, so that a row shares the most tokens
    with the row before it."""

    tips: dict[int, Segment] = field(default_factory=dict)
    """The last segment of each row, by the row's number."""
    tokens: int = 0
    """The tokens of all segments."""
    _last: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    """The ids of the row that was added last."""

    def segments(self) -> list[Segment]:
        """All segments, each after its parent."""
        return list(dict.fromkeys(each for tip in self.tips.values() for each in tip.path))

    def shared(self, ids_L: Ids) -> int:
        """How many of these tokens the tree has already."""
        common = _common(self._last, ids_L)
        inside = next((each for each in self._path() if each.end >= common), None)
        if inside is None or common == inside.end or common - inside.start >= FEWEST_SHARED:
            return common if inside else 0
        return inside.start

    def add(self, row: int, ids_L: Ids, shared: int) -> None:
        """`shared` is what `shared` returns for these ids, or 0."""
        length = len(ids_L)
        parent = self._cut(shared) if shared else None
        if parent is None or shared < length:
            parent = Segment(row, shared, length, parent)
        self.tips[row], self._last = parent, ids_L
        self.tokens += length - shared

    def _cut(self, end: int) -> Segment:
        """The segment of the last row's path that ends at `end`; cuts one in two if there is none."""
        inside = next(each for each in self._path() if each.end >= end)
        if inside.end == end:
            return inside
        upper = Segment(inside.row, inside.start, end, inside.parent)
        inside.start, inside.parent = end, upper
        return upper

    def _path(self) -> list[Segment]:
        return next(reversed(self.tips.values())).path if self.tips else []


Pack = list[PrefixTree]


class PackLayout(NamedTuple):
    """A pack as one sequence of N tokens in S segments. The fields are those of `MicroBatch`."""

    ids_N: Ids
    positions_N: Ids
    lengths_S: Ids
    parents_S: Ids
    places: Mapping[int, Ids]
    """Where each token of a row is in the sequence, by the row's number, in the order of packing."""


def layout_of(rows: Sequence[Ids], pack: Pack) -> PackLayout:
    """The sequence of a pack. `rows` has the ids of each row."""
    segments = [segment for tree in pack for segment in tree.segments()]
    numbers = {segment: number for number, segment in enumerate(segments)}
    lengths_S = np.array([len(segment) for segment in segments])
    starts_S = lengths_S.cumsum() - lengths_S
    parents = [-1 if each.parent is None else numbers[each.parent] for each in segments]
    places = {
        row: np.concatenate([starts_S[numbers[each]] + np.arange(len(each)) for each in tip.path])
        for tree in pack
        for row, tip in tree.tips.items()
    }

    return PackLayout(
        ids_N=np.concatenate([rows[each.row][each.start : each.end] for each in segments]),
        positions_N=np.concatenate([np.arange(each.start, each.end) for each in segments]),
        lengths_S=lengths_S,
        parents_S=np.array(parents),
        places=places,
    )


def packs_of(rows: Sequence[Ids], max_tokens: int, share_prefixes: bool) -> list[Pack]:
    """The trees of each micro-batch, of rows with these ids.

    First fit decreasing: each tree, the largest first, goes into the first pack with enough room. Trees of
    equal size keep their order, so equal rows always make equal packs. A row of more than `max_tokens` stands
    alone."""
    trees = list(_trees(rows, max_tokens, share_prefixes))
    packs: list[Pack] = []
    room: list[int] = []
    for tree in sorted(trees, key=lambda tree: (-tree.tokens, min(tree.tips))):
        place = next((place for place, left in enumerate(room) if tree.tokens <= left), len(packs))
        if place == len(packs):
            packs.append([])
            room.append(max_tokens)
        packs[place].append(tree)
        room[place] -= tree.tokens
    return packs


def _trees(rows: Sequence[Ids], max_tokens: int, share_prefixes: bool) -> Iterator[PrefixTree]:
    """Trees of at most `max_tokens` tokens that contain each row once. A longer row is a tree of its own."""
    tree = PrefixTree()
    for row in _sorted(rows) if share_prefixes else range(len(rows)):
        shared = tree.shared(rows[row]) if share_prefixes else 0
        if tree.tips and (not shared or tree.tokens + len(rows[row]) - shared > max_tokens):
            yield tree
            tree, shared = PrefixTree(), 0
        tree.add(row, rows[row], shared)
    if tree.tips:
        yield tree


def _sorted(rows: Sequence[Ids]) -> list[int]:
    """The numbers of the rows in an order in which rows with a common prefix are neighbours."""
    keys = [row.astype(np.int32).tobytes() for row in rows]
    return sorted(range(len(rows)), key=keys.__getitem__)


def _common(one: Ids, other: Ids) -> int:
    """The length of the longest common prefix."""
    shorter = min(len(one), len(other))
    unequal = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(unequal[0]) if len(unequal) else shorter
