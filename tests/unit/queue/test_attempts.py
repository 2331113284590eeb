"""Which turn a retry replaces, in whatever order a call and its retries are recorded."""

from typing import Any

from rollout_queue.contract.attempts import related
from rollout_queue.contract.records import Turn
from tests.support.queue.records import turn


def attempt(number: int, **fields: Any) -> Turn:
    return turn(f"t{number}", request_digest="d", attempt=number, started_at=100.0 + number, **fields)


def test_the_first_later_retry_replaces_a_turn_that_is_recorded_last() -> None:
    assert related(attempt(0), [attempt(2), attempt(1)]).orphan_of == "t1"


def test_a_retry_that_has_replaced_another_turn_of_the_attempt_is_no_longer_free() -> None:
    other = turn("other", request_digest="d", attempt=0, started_at=100.0, orphan_of="t1")
    assert related(attempt(0), [other, attempt(1), attempt(2)]).orphan_of == "t2"


def test_a_retry_replaces_the_last_earlier_attempt_but_an_aborted_one_first() -> None:
    assert related(attempt(2), [attempt(0), attempt(1)]).retry_of == "t1"
    assert related(attempt(2), [attempt(0, finish="abort"), attempt(1)]).retry_of == "t0"
