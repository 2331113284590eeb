"""Random rows that share prefixes: the prompt of a group, and histories that branch."""

from dataclasses import replace

import numpy as np

from tests.support.trainer_service.random_rows import VOCABULARY, row_of
from trainer_service.rows.rows import Ints, Row


def row_with(ids_L: Ints, seed: int) -> Row:
    """A row with these ids, a random mask, and a reward at its end."""
    rewards_L = np.zeros(len(ids_L), np.float32)
    rewards_L[-1] = np.random.default_rng(seed).normal()
    return replace(row_of(len(ids_L), seed), ids_L=ids_L, rewards_L=rewards_L)


def related_rows(*, roots: int, branches: int, tips: int, shared: int = 40, seed: int = 0) -> list[Row]:
    """`roots` prefixes of `shared` tokens, each continued by `branches` histories of as many tokens, each
    continued by `tips` answers of unequal lengths, in random order."""
    draw = np.random.default_rng(seed)

    def ids(length: int) -> Ints:
        return draw.integers(2, VOCABULARY, length)

    found = []
    for _ in range(roots):
        root = ids(shared)
        for _ in range(branches):
            history = np.concatenate([root, ids(shared)])
            found += [np.concatenate([history, ids(int(draw.integers(5, 20)))]) for _ in range(tips)]
    return [row_with(found[at], seed + number) for number, at in enumerate(draw.permutation(len(found)))]
