"""Lists and rewards cost what they return: they read no tokens of others, and each group once."""

from typing import Any

from rollout_queue.contract.codec import encode
from rollout_queue.contract.records import Span
from rollout_queue.contract.tokens import Logprobs, TokenIds
from rollout_queue.redis import keys
from tests.support.gateway.redis_traffic import TOKENS, TURN_BYTES, sent_by_redis
from tests.support.gateway.running import OTHER_KEY, RunningGateway
from tests.support.queue.records import turn


def fat_session(gateway: RunningGateway) -> str:
    """A session with one very long turn."""
    session_id = str(gateway.session()["session_id"])
    output = {"output_ids": TokenIds([1]), "logprobs": Logprobs([0.0]), "versions": (Span(0, 0, 1),)}
    fat = turn("fat", session_id, context_ids=TokenIds([7] * TOKENS), **output)
    gateway.redis.hset(keys.session(session_id), "t:fat", encode(fat))
    return session_id


def test_a_list_reads_no_sessions_of_other_owners(gateway: RunningGateway) -> None:
    fat_session(gateway)
    own = gateway.call("POST", "/sessions", {}, key=OTHER_KEY).json()["session_id"]

    def listed() -> None:
        rows = gateway.get("/sessions", key=OTHER_KEY).json()["data"]
        assert [row["session_id"] for row in rows] == [own]

    assert sent_by_redis(gateway, listed) < TURN_BYTES


def test_a_list_reads_only_sessions_of_the_group_and_user_that_it_is_asked_for(
    gateway: RunningGateway,
) -> None:
    fat_session(gateway)
    own = gateway.session(group_id="g", user="u")["session_id"]

    def listed() -> None:
        for query in ("group_id=g", "user=u"):
            rows = gateway.get(f"/sessions?{query}").json()["data"]
            assert [row["session_id"] for row in rows] == [own]

    assert sent_by_redis(gateway, listed) < TURN_BYTES


def test_a_reward_reads_no_turns(gateway: RunningGateway) -> None:
    path = f"/sessions/{fat_session(gateway)}/reward"

    def rewarded() -> None:
        replies = [gateway.post(path, {"value": 1.0}).json()["reward"] for _ in range(3)]
        assert replies == [1.0, 2.0, 3.0]

    assert sent_by_redis(gateway, rewarded) < TURN_BYTES


def test_a_list_reads_each_group_once(gateway: RunningGateway) -> None:
    size = 200
    members = gateway.post("/groups", {"size": size}).json()["sessions"]
    for member in members[:100]:
        end = {"status": "completed", "reward": 1.0}
        assert gateway.post(f"/sessions/{member['session_id']}/finish", end).status_code == 200

    def group_reads() -> int:
        stats: Any = gateway.redis.info("commandstats")
        return int(stats.get("cmdstat_smembers", {"calls": 0})["calls"])

    reads = []
    for _ in range(
        5
    ):  # the gateway's poll reads groups, too, so the fewest reads are nearest to the list's own
        before = group_reads()
        rows = gateway.get(f"/sessions?limit={2 * size}").json()["data"]
        reads.append(group_reads() - before)
    assert min(reads) < 100, reads  # a list that reads the group of each verdict reads it as often
    assert [row["verdict"]["code"] for row in rows].count("group_incomplete") == 100
    assert [row["verdict"]["code"] for row in rows].count("open") == 100
