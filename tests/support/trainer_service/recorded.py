"""What steps have recorded of the tokens of turns, as numbers that a test can compare."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import pytest

from rollout_queue.contract.packed_tokens import TrainedTokens
from trainer_service.step.step_parts import TurnRecord

HALF_PRECISION = 1e-3
"""The relative error of a float16, and a little more."""


class Numbers(NamedTuple):
    """The advantage and the ratio of each token of a turn; None for what is not recorded."""

    advantages: Sequence[float] | None
    ratios: Sequence[float | None] | None


def numbers_of(packed: bytes) -> Numbers:
    found = TrainedTokens.unpack(packed)
    return Numbers(found.advantage_list, found.ratio_list)


def recorded(records: Iterable[TurnRecord]) -> Mapping[tuple[str, str], Numbers]:
    """By session and turn. Each turn has one record."""
    every = list(records)
    found = {(each.session_id, each.turn_id): numbers_of(each.packed) for each in every}
    assert len(found) == len(every)
    return found


def assert_same_records(some: Iterable[TurnRecord], others: Iterable[TurnRecord]) -> None:
    """The records of the same step, computed in another way."""
    mine, theirs = recorded(some), recorded(others)
    assert mine.keys() == theirs.keys()
    for name, numbers in mine.items():
        advantages, ratios = theirs[name]
        if advantages is None:  # imitation has none
            assert numbers.advantages is None
        else:
            assert numbers.advantages == pytest.approx(advantages, rel=1e-4, abs=1e-6)
        if ratios is None:
            assert numbers.ratios is None
        else:
            assert numbers.ratios == pytest.approx(ratios, rel=2 * HALF_PRECISION)
