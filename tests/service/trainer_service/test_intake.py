"""Odd records from agents and faults of Redis neither stop the trainer nor cost a session its verdict."""

import asyncio
import json
import socket
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import pytest

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.records import Reward, SessionSpec
from rollout_queue.contract.stream import Entry, Verdicts
from rollout_queue.redis.client.settings import RedisSettings
from rollout_queue.redis.reader import RedisReader
from tests.support.trainer_service.harness import Harness, MakeHarness, turn
from trainer_service.__main__ import REDIS_TIMEOUT_S, connect
from trainer_service.groups.assemble import Group
from trainer_service.groups.screening import ScreenedGroup, screen
from trainer_service.intake.entry_reader import BLOCK_S


@pytest.mark.parametrize("huge", [1e308, -1e39, 1e25])
def test_a_huge_reward_ends_its_session_and_not_the_trainer(harness: Harness, huge: float) -> None:
    for index, value in enumerate([huge, huge, 1.0, 0.0]):
        harness.agents.episode(f"g-{index}", value, group_id="g", size=4, output_ids=[10 + index, 1])
    assert harness.trainer.run_once()
    assert list(harness.session_codes().values()) == ["invalid", "invalid", "trained", "trained"]


def test_rewards_that_add_up_to_infinity_end_their_session(harness: Harness) -> None:
    harness.agents.open("s")
    harness.agents.call(turn("s"))
    for key in ("k1", "k2"):  # no gateway stores the second one
        harness.stream.append(Reward(session_id="s", value=1.7e308, key=key, created_at=102.0))
    harness.agents.finish("s")
    assert not harness.trainer.run_once()
    assert harness.session_codes() == {"s": "invalid"}


def test_an_agent_that_gives_the_reason_expired_does_not_expire_its_session(harness: Harness) -> None:
    for session_id, value in (("a", 1.0), ("b", 0.0)):
        harness.agents.episode(session_id, value, group_id="g", size=2, reason="expired")
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained"}


def test_an_overdue_group_goes_on_without_the_members_that_never_came(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"group_wait_s": 1.0}).start()
    harness.agents.episode("a", 1.0, group_id="g", size=3)
    harness.agents.episode("b", 0.0, group_id="g", size=3, output_ids=[12, 1])
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained"}


def test_a_backlog_does_not_split_a_group(make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_service.intake.entry_reader.READ_COUNT", 3)
    harness = make_harness(algorithm={"group_wait_s": 1.0}).start()
    harness.agents.episode("a", 1.0, group_id="g", size=2)
    harness.agents.episode("b", 0.0, group_id="g", size=2, output_ids=[12, 1])
    assert not harness.trainer.run_once()
    assert harness.session_codes() == {"a": None, "b": None}
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained"}


def test_after_an_outage_a_step_screens_only_the_groups_that_it_may_take(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[str] = []

    def noting(group: Group, *given: Any) -> ScreenedGroup:
        judged.append(group.group_id)
        return screen(group, *given)

    monkeypatch.setattr("trainer_service.groups.selection.screen", noting)
    harness = make_harness(algorithm={"intake": "oldest", "max_rows": 4, "max_staleness": 1}).start()
    for number in range(12):
        harness.agents.group(f"g{number:02}", [1.0, 0.0])
    assert [harness.trainer.run_once() for _ in range(3)] == [True, True, False]
    assert list(harness.session_codes().values()) == ["trained"] * 8 + ["stale"] * 16
    steps = [judged[:3], judged[3:6], judged[6:]]
    assert [len(step) for step in steps] == [3, 3, 8], "a step screens the groups that it takes, and one more"


def test_many_groups_are_acknowledged_in_several_transactions(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_service.intake.acknowledger.GROUPS_AT_ONCE", 2)
    harness = make_harness().start()
    acknowledged, acknowledge = list[int](), harness.stream.acknowledge

    def noting(entry_ids: Any, verdicts: Verdicts) -> None:
        acknowledged.append(len(verdicts.sessions))
        acknowledge(entry_ids, verdicts)

    monkeypatch.setattr(harness.stream, "acknowledge", noting)
    for number in range(5):
        harness.agents.group(f"g{number}", [1.0, 1.0])
    assert not harness.trainer.run_once()
    assert acknowledged == [4, 4, 2]
    assert list(harness.session_codes().values()) == ["zero_advantage"] * 10


def test_a_group_that_is_too_old_is_not_counted_as_one_of_equal_rewards(make_harness: MakeHarness) -> None:
    harness = make_harness(initial_version=9).start()
    harness.agents.group("old", [1.0, 0.0], version=0)
    harness.agents.group("new", [1.0, 0.0], version=9)
    assert harness.trainer.run_once()
    values = json.loads((harness.root / "metrics.jsonl").read_text())
    assert (values["group/live"], values["group/zero_var"], values["group/dropped"]) == (1, 0, 2)


def test_calls_to_redis_time_out() -> None:
    timeouts = connect(RedisSettings()).get_connection_kwargs()
    assert BLOCK_S < timeouts["socket_timeout"] <= REDIS_TIMEOUT_S


@pytest.mark.parametrize("wish", ["", "&retry_on_timeout=yes"])
def test_a_read_whose_answer_was_lost_is_noticed_and_not_repeated(wish: str) -> None:
    """Entries of such a read are pending. The trainer must notice the loss, so that it reclaims them."""
    heard: list[bytes] = []
    reading = b"XREADGROUP"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def redis() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        while (said := connection.recv(65536)) and reading not in said:
                            connection.sendall(b"+OK\r\n" * said.count(b"*"))
                        heard.append(said)

        Thread(target=redis, daemon=True).start()
        client = connect(
            RedisSettings(redis_url=f"redis://127.0.0.1:{server.getsockname()[1]}/0?protocol=2{wish}")
        )
        reader = RedisReader(client, "OK")  # this Redis gives OK as the lease's token
        with pytest.raises(StorageUnavailable):
            reader.read(10, 0.01)
        client.close()
    assert [reading in said for said in heard] == [True]


def test_entries_of_a_lost_answer_are_reclaimed(harness: Harness) -> None:
    harness.agents.group("g", [1.0, 0.0])
    read = harness.stream.read

    def lost(count: int, block_s: float) -> Sequence[object]:
        read(count, block_s)
        raise StorageUnavailable("connection reset")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.stream, "read", lost)
        assert harness.trainer.run_once()
    assert set(harness.session_codes().values()) == {"trained"}


def test_a_sessions_rewards_add_up_and_a_repeated_turn_counts_once(harness: Harness) -> None:
    harness.agents.open("a", "g", 2)
    harness.agents.call(turn("a", "a-t"), turn("a", "a-t"))
    harness.agents.reward("a", 0.25, key="k1", turn_id="a-t")
    harness.agents.reward("a", 0.5, key="k2")
    harness.agents.finish("a", 0.25)
    harness.agents.episode("b", 0.0, group_id="g", size=2, output_ids=[12, 1])
    assert harness.trainer.run_once()
    values = json.loads((harness.root / "metrics.jsonl").read_text())
    assert values["reward_mean"] == 0.5
    assert (values["rows"], values["tokens"]) == (2, 5)
    assert not list(harness.stream.reclaim())


def test_a_session_that_was_opened_without_training_ends_as_not_for_training(harness: Harness) -> None:
    asyncio.run(harness.stream.open_session(SessionSpec(session_id="s", train=False, created_at=100.0)))
    harness.agents.call(turn("s"))
    harness.agents.finish("s", train=False)
    harness.trainer.run_once()
    assert harness.session_codes() == {"s": "not_for_training"}


def test_a_token_id_outside_the_vocabulary_makes_a_session_invalid(harness: Harness) -> None:
    harness.agents.episode("s", 1.0, output_ids=[64, 1])
    harness.trainer.run_once()
    assert harness.session_codes() == {"s": "invalid"}


def test_a_session_that_expires_waiting_for_its_reward_is_closed(harness: Harness) -> None:
    harness.agents.open("s")
    harness.agents.call(turn("s"))
    harness.agents.finish("s")
    harness.trainer.run_once()
    assert len(list(harness.stream.reclaim())) == 2
    asyncio.run(harness.stream.expire(now=1e13, limit=10))
    harness.trainer.run_once()
    assert harness.session_codes() == {"s": "expired"}
    assert not list(harness.stream.reclaim())


def test_later_entries_of_a_settled_session_are_acknowledged_and_not_trained(
    harness: Harness,
) -> None:
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run_once()
    harness.stream.append(turn("g-0", "late", output_ids=[30, 1]))
    assert not harness.trainer.run_once()
    assert not list(harness.stream.reclaim())
    again = harness.restart()
    again.stream.append(turn("g-0", "later", output_ids=[30, 1]))
    assert not again.trainer.run_once()
    assert not list(again.stream.reclaim())


def test_turns_that_are_not_trained_say_why(harness: Harness) -> None:
    for session_id, value in (("a", 1.0), ("b", 0.0)):
        harness.agents.open(session_id, "g", 2)
        asked = {"parent_id": "kept", "request_digest": "d", "context_ids": [6]}
        harness.agents.call(
            turn(session_id, "kept"),
            turn(session_id, "gone", finish="abort", parent_id="kept", relation="extends", context_ids=[5]),
            turn(session_id, "first", **asked),
            turn(session_id, "again", **asked, attempt=1, started_at=110.0),
        )
        harness.agents.finish(session_id, value)
    assert harness.trainer.run_once()
    codes = {turn_id: verdict.code for turn_id, verdict in harness.stream.heads["a"].turn_verdicts.items()}
    assert codes == {"kept": "trained", "gone": "aborted", "first": "orphan_retry", "again": "trained"}
    assert sorted(harness.checkpoints.ledger(0, 1)[0].turns) == ["again", "again", "kept", "kept"]


@pytest.mark.parametrize("order", [("first", "again"), ("again", "first")])
@pytest.mark.parametrize("restarted", [False, True])
def test_an_orphan_is_not_trained_although_it_was_read_before_its_retry(
    harness: Harness, order: tuple[str, str], restarted: bool
) -> None:
    for session_id in ("a", "b"):
        harness.agents.open(session_id, "g", 2)
    attempts = {
        "first": {"attempt": 0, "started_at": 100.0, "output_ids": [20, 1]},
        "again": {"attempt": 1, "started_at": 110.0, "output_ids": [21, 1]},
    }
    for name in order:
        for session_id in ("a", "b"):
            harness.agents.call(turn(session_id, name, request_digest="d", **attempts[name]))
        assert not harness.trainer.run_once()
        if restarted:
            harness = harness.restart()
    for session_id, value in (("a", 1.0), ("b", 0.0)):
        harness.agents.finish(session_id, value)
    assert harness.trainer.run_once()
    codes = {turn_id: verdict.code for turn_id, verdict in harness.stream.heads["a"].turn_verdicts.items()}
    assert codes == {"first": "orphan_retry", "again": "trained"}
    assert sorted(harness.checkpoints.ledger(0, 1)[0].turns) == ["again", "again"]


def test_a_poll_does_not_touch_the_tokens_of_groups_that_wait(make_harness: MakeHarness) -> None:
    """A row takes 44 bytes for each token. Making the rows of every poll cost seconds with 16M tokens."""
    tokens = 100_000
    harness = make_harness(algorithm={"min_live_rows": 4, "max_tokens": 3 * tokens}).start()
    long = {"output_ids": [10] * tokens, "logprobs": [-1.0] * tokens}
    for name, reward in (("a", 1.0), ("b", 0.0)):
        harness.agents.episode(name, reward, group_id="g", size=2, **long)
    assert not harness.trainer.run_once()
    tracemalloc.start()
    try:
        assert not harness.trainer.run_once()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < tokens


def test_a_rollout_with_too_long_a_row_is_not_trained(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"max_row_tokens": 20}).start()
    for name, reward, tokens in (("a", 1.0, 3), ("b", 0.0, 3), ("c", 1.0, 20)):
        answer = {"output_ids": [10] * tokens, "logprobs": [-1.0] * tokens}
        harness.agents.episode(name, reward, group_id="g", size=3, **answer)
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained", "c": "too_long"}
    verdict = harness.stream.heads["c"].verdict
    assert verdict is not None
    assert verdict.detail.endswith(" tokens, at most 20 are trained")


def test_a_trainer_that_has_its_next_groups_waits_for_no_entries(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, waits = harness.stream.read, list[float]()

    def reading(count: int, block_s: float) -> Sequence[Entry]:
        waits.append(block_s)
        return read(count, block_s)

    monkeypatch.setattr(harness.stream, "read", reading)
    for name in ("a", "b", "c"):
        harness.agents.group(name, [1.0, 0.0])
    while harness.trainer.run_once():
        pass
    harness.trainer.run_once()
    first, *next_ones, last = waits
    assert first > 0
    assert next_ones
    assert not any(next_ones), "a full batch was there before each"
    assert last > 0
