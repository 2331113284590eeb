"""The cache of session heads stays within its limit."""

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.tokens import TokenIds
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
