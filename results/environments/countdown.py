"""Countdown: make a number of three others."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations_with_replacement, permutations, product
from random import Random
from typing import Any, NamedTuple

OPERATIONS = "+-*"
LARGEST, LARGEST_TARGET = 6, 30
FORM = re.compile(r"(\d{1,3})([+\-*])(\d{1,3})([+\-*])(\d{1,3})")


class Puzzle(NamedTuple):
    numbers: tuple[int, int, int]
    target: int
    expression: str
    """One that makes the target."""

    @property
    def question(self) -> str:
        return f"use {' '.join(map(str, self.numbers))} to make {self.target}"


def value_of(expression: str) -> int | None:
    """The value of three numbers with two operations between them; None for any other text."""
    found = FORM.fullmatch(expression.replace(" ", ""))
    if found is None:
        return None
    a, first, b, second, c = found.groups()
    if second == "*" and first != "*":
        return _applied(int(a), first, int(b) * int(c))
    return _applied(_applied(int(a), first, int(b)), second, int(c))


def _applied(a: int, operation: str, b: int) -> int:
    return a + b if operation == "+" else a - b if operation == "-" else a * b


@cache
def puzzles(held_out: bool) -> Sequence[Puzzle]:
    """Each three numbers with each target that they can make, in an order that is always the same. The last
    fifth is held out."""
    found: dict[tuple[Any, int], Puzzle] = {}
    for numbers in combinations_with_replacement(range(1, LARGEST + 1), 3):
        for a, b, c in sorted(set(permutations(numbers))):
            for first, second in product(OPERATIONS, repeat=2):
                expression = f"{a}{first}{b}{second}{c}"
                value = value_of(expression)
                if value is not None and 1 <= value <= LARGEST_TARGET:
                    found.setdefault((numbers, value), Puzzle(numbers, value, expression))
    ordered = [*found.values()]
    Random(0).shuffle(ordered)
    cut = len(ordered) * 4 // 5
    return ordered[cut:] if held_out else ordered[:cut]


def reward_of(numbers: Sequence[int], target: int, answer: str) -> float:
    """1 for an expression with the right value, 0.1 for another one that uses each number once, else 0."""
    value = value_of(answer.strip())
    used = sorted(map(int, re.findall(r"\d+", answer)))
    if value is None or used != sorted(numbers):
        return 0.0
    return 1.0 if value == target else 0.1


class Countdown:
    """`held_out` has the puzzles that no training sees."""

    def __init__(self, held_out: bool = False) -> None:
        self._puzzles = puzzles(held_out)

    def __len__(self) -> int:
        return len(self._puzzles)

    def tasks(self, seed: int) -> Iterator[dict[str, Any]]:
        for puzzle in self._puzzles:
            yield {"question": puzzle.question, "numbers": puzzle.numbers, "target": puzzle.target}

    def reset(self, task: dict[str, Any]) -> str:
        self._numbers, self._target = task["numbers"], task["target"]
        return str(task["question"])

    def step(self, answer: str) -> tuple[None, float, bool, bool, dict[str, float]]:
        return None, reward_of(self._numbers, self._target, answer), True, False, {}
