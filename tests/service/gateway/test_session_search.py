"""`GET /sessions` finds sessions by what is known of them, in both orders, and reads no tokens for it."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway.rest import listing
from rollout_queue.contract.codec import encode
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Span, Turn, Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import key_names
from tests.support.claimed import claimed_reader
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, OTHER_KEY, Backends, RunningGateway
from tests.support.queue.records import turn

TOKENS = 2**18
TURN_BYTES = 4 * TOKENS
"""An id takes four bytes, so no answer of Redis with a turn of so many tokens is shorter."""


def found(gateway: RunningGateway, query: str, key: str = ADMIN_KEY) -> list[str]:
    """The ids of all pages."""
    ids, cursor = [], "0"
    while cursor is not None:
        page = gateway.get(f"/sessions?{query}&cursor={cursor}", key=key).json()
        ids += [row["session_id"] for row in page["data"]]
        cursor = page["next_cursor"]
    return ids


def rewarded(gateway: RunningGateway, name: str, reward: float | None, **body: object) -> None:
    gateway.session(session_id=name, **body)
    path = f"/sessions/{name}"
    assert gateway.chat(path=f"{path}/v1/chat/completions").status_code == 200
    if reward is not None:
        gateway.post(f"{path}/finish", {"status": "completed", "reward": reward})


def test_sessions_are_found_by_task_reward_and_a_part_of_the_id(gateway: RunningGateway) -> None:
    rewarded(gateway, "sum-1", 0.0, task_id="sums")
    rewarded(gateway, "sum-2", 0.5, task_id="sums")
    rewarded(gateway, "sum-3", 1.0, task_id="sums", group_id="g", group_size=2)
    rewarded(gateway, "word-4", None, task_id="words")
    assert found(gateway, "task_id=sums") == ["sum-1", "sum-2", "sum-3"]
    assert found(gateway, "task_id=sums&order=newest&limit=1") == ["sum-3", "sum-2", "sum-1"]
    assert found(gateway, "min_reward=0.5") == ["sum-2", "sum-3"]
    assert found(gateway, "max_reward=0.5&min_reward=0.1") == ["sum-2"]
    assert found(gateway, "max_reward=2") == ["sum-1", "sum-2", "sum-3"]
    assert found(gateway, "id=ord-") == ["word-4"]
    assert found(gateway, "verdict=group_incomplete&order=newest") == ["sum-3"]
    assert found(gateway, "group_id=g&user=nobody") == []
    for bad in ("min_reward=nan", "max_reward=x", "order=odd", "version=x", f"id={'x' * 201}"):
        assert gateway.get(f"/sessions?{bad}").status_code == 400, bad


def test_sessions_are_found_by_the_version_that_sampled_or_that_their_step_made(
    gateway: RunningGateway,
) -> None:
    rewarded(gateway, "first", 1.0)
    rewarded(gateway, "second", None)
    verdict = b'{"code":"trained","step":3,"version":7}'
    gateway.redis.hset(key_names.session("first"), "verdict", verdict)
    (row,) = gateway.get("/sessions?id=first").json()["data"]
    sampled = row["versions"]["first"]
    assert found(gateway, f"version={sampled}") == ["first", "second"]
    assert found(gateway, f"version={sampled + 1}") == []
    assert found(gateway, "trained_version=7") == ["first"]
    assert (row["turn_count"], row["output_len"] > 0, sampled) == (1, True, row["versions"]["last"])


def test_a_search_for_what_a_step_has_trained_looks_at_no_other_session(
    gateway: RunningGateway, backends: Backends
) -> None:
    rewarded(gateway, "taught", 1.0, task_id="t")
    trainer = claimed_reader(backends.redis)
    entries = trainer.read(100, 0.01)
    verdict = Verdict(code="trained", step=3, version=7)
    turns = {("taught", each.record.turn_id): verdict for each in entries if isinstance(each.record, Turn)}
    trainer.acknowledge([each.entry_id for each in entries], Verdicts({"taught": verdict}, turns))
    for number in range(5):
        gateway.session(session_id=f"other-{number}")
    page = gateway.get("/sessions?trained_version=7&order=newest").json()
    assert ([row["session_id"] for row in page["data"]], page["looked_at"]) == (["taught"], 1)
    assert found(gateway, "trained_version=7&task_id=t") == ["taught"]
    assert found(gateway, "trained_version=7&task_id=u") == []
    assert found(gateway, "trained_version=6") == []


def test_a_client_key_finds_only_its_own_sessions(gateway: RunningGateway) -> None:
    gateway.session(session_id="mine", task_id="t")
    gateway.post("/sessions", {"session_id": "theirs", "task_id": "t"}, key=OTHER_KEY)
    assert found(gateway, "task_id=t", key=OTHER_KEY) == ["theirs"]
    assert found(gateway, "id=mine", key=OTHER_KEY) == []
    assert found(gateway, "task_id=t&order=newest") == ["theirs", "mine"]


def test_a_search_ends_after_some_sessions_and_says_how_far_it_looked(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "MOST_LOOKED_AT", 2)
    for number in range(5):
        gateway.session(session_id=f"s{number}", task_id="rare" if number == 0 else "often")
    page = gateway.get("/sessions?task_id=rare&order=newest&limit=1").json()
    assert (page["data"], page["looked_at"]) == ([], 2)
    assert page["looked_until"] == gateway.get("/sessions/s3").json()["created_at"]
    assert found(gateway, "task_id=rare&order=newest&limit=1") == ["s0"]


def long_session(gateway: RunningGateway) -> str:
    """A session with one very long turn."""
    session_id = str(gateway.session()["session_id"])
    output = {"output_ids": TokenIds([1]), "logprobs": Logprobs([0.0]), "versions": (Span(0, 0, 1),)}
    long = turn("long", session_id, context_ids=TokenIds([7] * TOKENS), finished_at=9.0, **output)
    gateway.redis.hset(key_names.session(session_id), mapping={"t:long": encode(long), "turns": "1 1 9 0 0"})
    return session_id


def sent_by_redis(gateway: RunningGateway, act: Callable[[], object]) -> int:
    """How many bytes Redis sent meanwhile, to all of its clients."""

    def sent() -> int:
        stats: Any = gateway.redis.info("stats")
        return int(stats["total_net_output_bytes"])

    before = sent()
    act()
    return sent() - before


def test_lists_and_rewards_read_no_tokens(gateway: RunningGateway) -> None:
    session_id = long_session(gateway)
    path = f"/sessions/{session_id}/reward"

    def listed() -> None:
        assert gateway.get("/sessions?task_id=t").json()["data"] == []
        (row,) = gateway.get("/sessions").json()["data"]
        assert (row["turn_count"], row["output_len"], row["versions"]) == (1, 1, {"first": 0, "last": 0})

    def rewarded() -> None:
        replies = [gateway.post(path, {"value": 1.0}).json()["reward"] for _ in range(3)]
        assert replies == [1.0, 2.0, 3.0]

    for act in (listed, rewarded):
        assert sent_by_redis(gateway, act) < TURN_BYTES / 2, act


def test_a_list_reads_no_sessions_of_other_owners_groups_and_users(gateway: RunningGateway) -> None:
    long_session(gateway)
    theirs = gateway.call("POST", "/sessions", {}, key=OTHER_KEY).json()["session_id"]
    mine = gateway.session(group_id="g", user="u")["session_id"]

    def listed() -> None:
        for query, key, name in (
            ("", OTHER_KEY, theirs),
            ("?group_id=g", CLIENT_KEY, mine),
            ("?user=u", CLIENT_KEY, mine),
        ):
            rows = gateway.get(f"/sessions{query}", key=key).json()["data"]
            assert [row["session_id"] for row in rows] == [name], query

    assert sent_by_redis(gateway, listed) < TURN_BYTES / 2


def test_a_list_reads_each_group_once(gateway: RunningGateway) -> None:
    size = 60
    members = gateway.post("/groups", {"size": size}).json()["sessions"]
    for member in members[:30]:
        end = {"status": "completed", "reward": 1.0}
        assert gateway.post(f"/sessions/{member['session_id']}/finish", end).status_code == 200

    def group_reads() -> int:
        stats: Any = gateway.redis.info("commandstats")
        return int(stats.get("cmdstat_smembers", {"calls": 0})["calls"])

    reads = []
    for _ in range(5):  # the gateway's poll reads groups, too: the fewest reads are nearest to the list's own
        before = group_reads()
        rows = gateway.get(f"/sessions?limit={2 * size}").json()["data"]
        reads.append(group_reads() - before)
    assert min(reads) < 30, reads  # a list that reads the group of each verdict reads it as often
    assert [row["verdict"]["code"] for row in rows].count("group_incomplete") == 30
    assert [row["verdict"]["code"] for row in rows].count("open") == 30
