"""Arithmetic of heads, retries and pushes: what the cache keeps, what a retry replaces, numbers of pushes."""

from typing import Any

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.outcomes import related
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Span, Turn
from rollout_queue.contract.serving_plan import ServingPlan
from rollout_queue.redis.session_heads import HeadCache
from tests.support.queue.records import spec, turn


def test_a_session_that_grows_makes_room_too() -> None:
    cache = HeadCache(limit=16_000)
    for name in ("old", "new"):
        cache.put(1, SessionHead(spec=spec(name)))
    cache.grow(1, 2, turn("t1", "new", context_ids=TokenIds(range(1500))))
    assert cache.session_ids() == ["new"]
    cache.grow(2, 3, turn("t2", "new", context_ids=TokenIds(range(5000))))
    assert cache.session_ids() == []


def test_sampled_tokens_take_room_with_their_logprobs() -> None:
    cache = HeadCache(limit=16_000)
    cache.put(1, SessionHead(spec=spec("s1")))
    output = {"output_ids": TokenIds(range(1500)), "logprobs": Logprobs([-1.0] * 1500)}
    cache.grow(1, 2, turn("t1", "s1", versions=(Span(0, 0, 1500),), **output))
    assert cache.session_ids() == []


def test_remembered_heads_are_bounded() -> None:
    cache = HeadCache(limit=40_000)
    for number in range(50):
        session_id = f"s{number}"
        cache.put(1, SessionHead(spec=spec(session_id)))
        cache.grow(1, 2, turn("t", session_id, context_ids=TokenIds(range(200))))
    assert 0 < len(cache) <= 5
    kept = cache.get("s49")
    assert kept is not None
    assert kept.fields == 2
    assert cache.get("s0") is None


def test_the_sessions_that_were_used_longest_ago_are_dropped() -> None:
    cache = HeadCache(limit=30_000)
    for number in range(100):
        cache.put(1, SessionHead(spec=spec(f"s{number}")))
        assert cache.get("s0") is not None, "it was used a moment ago"
    assert cache.get("s98") is not None
    assert cache.get("s50") is None


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


def test_numbers_grow_in_one_moment_and_after_a_loss_of_the_plan() -> None:
    plan, given = ServingPlan(), []
    for version in range(3):
        plan = plan.begun(version, 1000.0, force=False)
        assert plan.push is not None
        given.append(plan.push.id)
    assert given == sorted(set(given))
    assert ServingPlan().next_id(1001.0) > given[-1]
