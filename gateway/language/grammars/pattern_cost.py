"""Estimates what a regular expression costs the engine's compiler: how often it reads the vocabulary.

pattern ──▶ tree ──unrolled──▶ positions, and which follow which ──▶ how many are active while tokens are read

The compiler reads each token from each position. Its time grows with the positions at which it then is at the
same time: one in `[a-z]{9}`, dozens in `([a-z]{1,9}){9}`, because a text can be read in dozens of ways.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from gateway.language.schema import PATTERN_PART
from rollout_queue.http.bodies.large_bodies import takes_long

KINDS: Final = {"e": 0.35, "E": 0.1, " ": 0.25, "0": 0.05, "中": 0.25}
"""A character of each kind, and the share of a vocabulary's tokens that go on with such characters."""
DEPTH: Final = 8
"""How many characters of a token are read: most have no more."""
STARTS: Final = 16
"""From how many positions tokens are read; the cost of the others is that of these."""
MOST_ACTIVE: Final = 40_000
"""Where the estimate stops, so that it takes a few hundredths of a second at most."""
AMBIGUITY: Final = 1.2
"""The exponent with which the time grows with the active positions."""


@dataclass(frozen=True)
class Part:
    """A part of a pattern with its positions, which are bits of numbers."""

    first: int = 0
    last: int = 0
    nullable: bool = True
    """Whether it matches the empty text."""


@lru_cache(maxsize=2048)
def steps_of(pattern: str) -> float:
    """How many steps the compiler takes for a token of average length from all positions; infinite for a
    pattern that is too complex to estimate."""
    takes_long()
    try:
        follows, atoms = _positions(pattern)
    except RecursionError:
        return float("inf")
    if not atoms:
        return 0.0
    matching = {kind: _matching(atoms, kind) for kind in KINDS}
    starts = list(range(0, len(follows), max(1, len(follows) // STARTS)))
    steps, active = 0.0, 0
    for start in starts:
        for kind, share in KINDS.items():
            here = 1 << start
            for _ in range(DEPTH):
                here = _next(follows, here) & matching[kind]
                if not here:
                    break
                active += here.bit_count()
                steps += share * here.bit_count() ** AMBIGUITY
                if active > MOST_ACTIVE:
                    return float("inf")
    return steps * len(follows) / len(starts)


def _next(follows: list[int], here: int) -> int:
    found = 0
    for position in _bits(here):
        found |= follows[position]
    return found


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _matching(atoms: list[str], kind: str) -> int:
    found = 0
    for position, atom in enumerate(atoms):
        if _matches(atom, kind):
            found |= 1 << position
    return found


@lru_cache(maxsize=1024)
def _matches(atom: str, character: str) -> bool:
    if len(atom) == 1 and atom != ".":
        return atom == character
    try:
        return re.fullmatch(atom, character, re.DOTALL) is not None
    except re.error:
        return True


def _positions(pattern: str) -> tuple[list[int], list[str]]:
    """For each position those that may follow it, and the atoms of all positions."""
    follows: list[int] = []
    atoms: list[str] = []
    _Builder(follows, atoms).alternatives(_parsed(pattern))
    return follows, atoms


Node = tuple[str, "list[list[Repeat]] | str"]
"""An atom, or the alternatives of a group."""
Repeat = tuple[Node, int, int | None]
"""A node, and how often it stands there: at least, and at most."""


def _parsed(pattern: str) -> "list[list[Repeat]]":
    """The alternatives of a pattern. A bracket without its counterpart is left out."""
    open_groups: list[list[list[Repeat]]] = [[[]]]
    for part in PATTERN_PART.finditer(pattern):
        here = open_groups[-1][-1]
        if part["quantifier"]:
            if here:
                here[-1] = _repeated(here[-1], part)
        elif part["begin"]:
            open_groups.append([[]])
        elif part["end"]:
            if len(open_groups) > 1:
                group = open_groups.pop()
                open_groups[-1][-1].append((("group", group), 1, 1))
        elif part["or"]:
            open_groups[-1].append([])
        elif not part["empty"]:
            here.append((("atom", part[0]), 1, 1))
    while len(open_groups) > 1:
        group = open_groups.pop()
        open_groups[-1][-1].append((("group", group), 1, 1))
    return open_groups[0]


def _repeated(node: Repeat, part: re.Match[str]) -> Repeat:
    simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
    low, high = simple.get(part["quantifier"], (0, 0))
    if part["quantifier"] not in simple:
        low = int(part["low"] or 0)
        high = (int(part["high"]) if part["high"] else None) if part["comma"] else low
    if node[1:] == (1, 1):
        return (node[0], low, high)
    return (("group", [[node]]), low, high)


class _Builder:
    """Unrolls a tree into positions."""

    def __init__(self, follows: list[int], atoms: list[str]) -> None:
        self._follows, self._atoms = follows, atoms

    def alternatives(self, several: "list[list[Repeat]]") -> Part:
        first = last = 0
        nullable = False
        for each in several:
            part = self._sequence([self._repeat(node) for node in each])
            first, last, nullable = first | part.first, last | part.last, nullable or part.nullable
        return Part(first, last, nullable)

    def _repeat(self, repeated: Repeat) -> Part:
        node, low, high = repeated
        copies = [self._once(node)]
        if not copies[0].first:  # nothing but empty texts, however often
            return copies[0]
        copies += [self._once(node) for _ in range(1, max(low, high or 0))]
        if high is None:
            self._join(copies[-1].last, copies[-1].first)
            return self._sequence([*copies[:-1], Part(copies[-1].first, copies[-1].last, nullable=low == 0)])
        # Each copy after the first `low` ones may be the last; none is skipped, unless all may be empty.
        skips = all(copy.nullable for copy in copies)
        optional = [Part(copy.first, copy.last, nullable=skips or copy.nullable) for copy in copies]
        part = self._sequence(optional)
        ends = 0
        for copy in copies[max(0, low - 1) :]:
            ends |= copy.last
        return Part(part.first, part.last | ends, part.nullable or low == 0)

    def _once(self, node: Node) -> Part:
        kind, content = node
        if kind == "atom" and isinstance(content, str):
            self._atoms.append(content)
            self._follows.append(0)
            here = 1 << (len(self._atoms) - 1)
            return Part(here, here, nullable=False)
        return self.alternatives(content) if isinstance(content, list) else Part()

    def _sequence(self, parts: list[Part]) -> Part:
        coming, last = 0, 0
        for part in reversed(parts):
            self._join(part.last, coming)
            coming = part.first | (coming if part.nullable else 0)
        for part in parts:
            last = part.last | (last if part.nullable else 0)
        return Part(coming, last, all(part.nullable for part in parts))

    def _join(self, last: int, first: int) -> None:
        for position in _bits(last):
            self._follows[position] |= first
