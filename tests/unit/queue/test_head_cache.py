"""The cache of session heads stays within its limit."""

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Span
from rollout_queue.contract.tokens import Logprobs, TokenIds
from rollout_queue.redis.heads.cache import HeadCache
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
