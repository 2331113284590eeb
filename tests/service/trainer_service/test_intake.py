"""What the trainer reads and takes: odd records, faults of Redis, more groups than steps take, old tokens."""

import asyncio
import json
import socket
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.published_policy import TrainedStep
from rollout_queue.contract.records import Reward, SessionSpec, Span
from rollout_queue.contract.stream import Entry, Verdicts
from rollout_queue.redis.settings import RedisSettings
from rollout_queue.redis.stream_reader import StreamReader
from tests.support.hypothesis_profiles import examples
from tests.support.long_cases import cases, in_turn
from tests.support.queue.memory_stream import MemoryStream
from tests.support.trainer_service.harness import Agents, Harness, MakeHarness, turn
from trainer_service.__main__ import REDIS_TIMEOUT_S, connect
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.entry_reader import BLOCK_S
from trainer_service.groups.assemble import Group
from trainer_service.groups.screening import ScreenedGroup, screen
from trainer_service.heartbeat import Heartbeat
from trainer_service.intake import Intake
from trainer_service.shared_state import SharedState
from trainer_service.trainer_metrics import TrainerMetrics


def test_a_huge_reward_or_a_strange_token_ends_its_session_and_not_the_trainer(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways of older releases stored such rewards. An agent's own reason `expired` does not expire its
    session."""
    monkeypatch.setattr("tests.support.queue.memory_stream.check_rewards", lambda rewards: None)
    for index, value in enumerate([1e308, -1e39, 1e25, 1.0, 0.0]):
        where = {"group_id": "g", "size": 5, "output_ids": [10 + index, 1], "reason": "expired"}
        harness.agents.episode(f"g-{index}", value, **where)
    harness.agents.open("sum")
    harness.agents.call(turn("sum", "sum-t"))
    for key in ("k1", "k2"):
        harness.stream.append(Reward(session_id="sum", value=1.7e308, key=key, created_at=102.0))
    harness.agents.finish("sum")
    harness.agents.episode("beyond the vocabulary", 1.0, output_ids=[64, 1])
    assert harness.trainer.run_once()
    assert list(harness.session_codes().values()) == [
        *["invalid"] * 3,
        "trained",
        "trained",
        *["invalid"] * 2,
    ]


def test_a_backlog_does_not_split_a_group(make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_service.entry_reader.READ_COUNT", 3)
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
    monkeypatch.setattr("trainer_service.intake.SESSIONS_AT_ONCE", 4)
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
        reader = StreamReader(client, "OK")  # this Redis gives OK as the lease's token
        with pytest.raises(StorageUnavailable):
            reader.read(10, 0.01)
        client.close()
    assert [reading in said for said in heard] == [True]


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
    assert not harness.pending


def test_a_session_that_was_opened_without_training_ends_as_not_for_training(harness: Harness) -> None:
    """And one that expires while it waits for its reward ends as expired."""
    asyncio.run(harness.stream.open_session(SessionSpec(session_id="s", train=False, created_at=100.0)))
    harness.agents.open("poor")
    for name in ("s", "poor"):
        harness.agents.call(turn(name, f"{name}-t"))
        harness.agents.finish(name, train=name != "s")
    harness.trainer.run_once()
    assert harness.session_codes() == {"s": "not_for_training", "poor": None}
    assert len(harness.pending) == 2
    asyncio.run(harness.stream.expire(now=1e13, limit=10))
    harness.trainer.run_once()
    assert harness.session_codes() == {"s": "not_for_training", "poor": "expired"}
    assert not harness.pending


def test_later_entries_of_a_settled_session_are_acknowledged_and_not_trained(
    harness: Harness,
) -> None:
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run_once()
    harness.stream.append(turn("g-0", "late", output_ids=[30, 1]))
    assert not harness.trainer.run_once()
    assert not harness.pending
    again = harness.restart()
    again.stream.append(turn("g-0", "later", output_ids=[30, 1]))
    assert not again.trainer.run_once()
    assert not again.pending


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
    assert sorted(harness.ledger[0].turns) == ["again", "again", "kept", "kept"]


@pytest.mark.parametrize(
    ("order", "restarted"), in_turn([("first", "again"), ("again", "first")], [False, True])
)
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
    assert sorted(harness.ledger[0].turns) == ["again", "again"]


def test_a_poll_does_not_touch_the_tokens_of_groups_that_wait(make_harness: MakeHarness) -> None:
    """Making the rows of every poll cost seconds with 16M tokens."""
    tokens, row_bytes_per_token = 100_000, 44
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
    assert peak < tokens * row_bytes_per_token, "not one of the two rows was made"


def test_a_rollout_with_too_long_a_row_is_not_trained(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"max_row_tokens": 20}).start()
    for name, reward, tokens in (("a", 1.0, 3), ("b", 0.0, 3), ("c", 1.0, 20)):
        answer = {"output_ids": [10] * tokens, "logprobs": [-1.0] * tokens}
        harness.agents.episode(name, reward, group_id="g", size=3, **answer)
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained", "c": "too_long"}
    assert harness.verdict("c").detail.endswith(" tokens, at most 20 are trained")


def test_a_trainer_with_a_full_batch_waits_for_no_entries(
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
    assert min(first, last) > 0 == max(next_ones), "a full batch was there before each but the first and last"


ONE_PAIR = {"min_live_rows": 2, "max_rows": 2}
"""A step takes one group of two."""
STEPS = 8
"""More than it takes until the bound of the waiting groups is reached."""


def arrive(harness: Harness, *names: str, at: float) -> None:
    """A group of two for each name, the later one a second younger."""
    for place, name in enumerate(names):
        versions = (Span(harness.trainer.version, 0, 3),)
        harness.agents.group(name, [1.0, 0.0], versions=versions, at=at + place)


def groups(harness: Harness, code: str | None) -> list[str]:
    codes = harness.session_codes()
    return sorted({name.rpartition("-")[0] for name, found in codes.items() if found == code})


@pytest.mark.parametrize("bound", cases([2, 6], long=[4]))
def test_at_twice_the_capacity_a_bound_limits_what_waits_and_how_old_it_gets(
    make_harness: MakeHarness, bound: int
) -> None:
    algorithm = {"intake": "bounded", "max_waiting_groups": bound, **ONE_PAIR}
    harness = make_harness(algorithm=algorithm).start()
    ages = []
    for number in range(STEPS):
        arrive(harness, f"{number:02}a", f"{number:02}b", at=100.0 + 2 * number)
        assert harness.trainer.run_once()
        ages.append(harness.told["staleness/total_max"])
        assert len(groups(harness, None)) <= bound
    # Two groups arrive with every step, so after `bound / 2` steps `bound` newer groups wait.
    assert max(ages) == bound / 2 - 1
    assert Counter(harness.session_codes().values())["trained"] == 2 * STEPS
    lost = groups(harness, "skipped_for_newer")
    assert len(lost) == STEPS - len(groups(harness, None))
    assert harness.verdict(f"{lost[0]}-0").detail.startswith(
        f"{bound} newer groups wait, and no more may (max_waiting_groups): sampled"
    )
    assert len(harness.pending) <= 3 * 2 * bound, "three entries of each waiting session"


def test_a_bound_that_is_smaller_than_a_step_does_not_prevent_the_step(make_harness: MakeHarness) -> None:
    algorithm = {"intake": "bounded", "max_waiting_groups": 1, "min_live_rows": 6, "max_rows": 6}
    harness = make_harness(algorithm=algorithm).start()
    arrive(harness, "a", "b", at=100.0)
    assert not harness.trainer.run_once()
    assert groups(harness, None) == ["a", "b"]
    arrive(harness, "c", "d", "e", at=110.0)
    assert harness.trainer.run_once()
    assert (groups(harness, "trained"), groups(harness, "skipped_for_newer")) == (["c", "d", "e"], ["a", "b"])


def test_a_replay_share_takes_the_oldest_groups_beside_the_newest(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"replay_share": 0.5, "min_live_rows": 4, "max_rows": 4}).start()
    arrive(harness, "a", "b", "c", "d", "e", "f", at=100.0)
    assert harness.trainer.run_once()
    assert groups(harness, "trained") == ["a", "f"]
    assert harness.trainer.run_once()
    assert groups(harness, "trained") == ["a", "b", "e", "f"]


@pytest.mark.parametrize(("arriving", "lost"), [(1, 0), (2, 6)], ids=["below capacity", "at capacity"])
def test_after_a_restart_the_oldest_groups_come_first_until_none_waits(
    make_harness: MakeHarness, arriving: int, lost: int
) -> None:
    """A step takes two groups. Six arrive while the trainer is away. If one more arrives for each step, all
    can be trained in time; the newest first would lose two of them."""
    bounds = {"max_staleness": 3, "min_live_rows": 4, "max_rows": 4}
    harness = make_harness(algorithm=bounds).start()
    arrive(harness, "a", "b", at=100.0)
    assert harness.trainer.run_once()
    harness.save()
    arrive(harness, *(f"away{number}" for number in range(6)), at=200.0)
    again = harness.restart()
    for number in range(24):
        arrive(again, *(f"new{number:02}-{each}" for each in range(arriving)), at=300.0 + 2 * number)
        again.trainer.run_once()
        if number == 1:
            assert {"away0", "away1", "away2", "away3"} <= {*groups(again, "trained")}
    assert len(groups(again, "skipped_for_newer")) == lost, "no more than are too many"
    assert again.told["staleness/total_max"] == 0, "the newest come first again"


class CountingStream(MemoryStream):
    """Counts the verdicts that each session gets."""

    def __init__(self) -> None:
        super().__init__()
        self.given = Counter[str]()

    def acknowledge(self, entry_ids: Any, verdicts: Verdicts) -> None:
        self.given.update(list(verdicts.sessions))
        super().acknowledge(entry_ids, verdicts)


CHOICES = st.one_of(
    st.builds(lambda share: {"intake": "newest", "replay_share": share}, st.sampled_from([0.0, 0.3, 0.9])),
    st.just({"intake": "oldest"}),
    st.builds(lambda bound: {"intake": "bounded", "max_waiting_groups": bound}, st.integers(1, 9)),
)


@given(
    CHOICES,
    st.fixed_dictionaries(
        {"curriculum": st.sampled_from([None, {"memory": 1}]), "over_sampling": st.sampled_from([0.0, 0.4])}
    ),
    st.lists(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=6), min_size=1, max_size=8),
    st.integers(1, 6),
)
@settings(max_examples=examples(40))
def test_every_session_waits_or_has_exactly_one_verdict(
    choice: dict[str, Any],
    more: dict[str, Any],
    arrivals: list[list[tuple[int, bool]]],
    rows: int,
) -> None:
    """Each round some groups arrive, of one to three sessions whose rewards differ or not; then comes a step
    if there is one."""
    algorithm = AlgorithmSettings.model_validate(
        {"min_live_rows": rows, "max_rows": rows, "max_staleness": 2, "group_wait_s": 1e12, **choice, **more}
    )
    stream = CountingStream()
    intake = Intake(
        stream, algorithm, 64, Heartbeat(stream, SharedState(), 0.01), TrainerMetrics(CollectorRegistry())
    )
    agents, trained, opened = Agents(stream), list[str](), 0
    version, early = 0, list[str]()
    for number, arriving in enumerate(arrivals):
        for place, (size, differ) in enumerate(arriving):
            values = [float(differ and index == 0) for index in range(size)]
            agents.group(
                f"{number}.{place}",
                values,
                version=version,
                at=100.0 + 10 * number + place,
                task_id=str(size),
            )
            opened += size
        intake.read()
        batch = intake.select(version, algorithm, early)
        selected = [each.group.group_id for each in batch.groups]
        assert set(early) <= set(selected), "groups that are learned early stay in their step"
        early = [] if batch.full else selected
        if batch.full:
            version += 1
            trained += [row.session_id for group in batch.groups for row in group.planned]
            made = [row for group in batch.groups for row in group.rows]
            intake.mark_trained(batch.groups, made, TrainedStep(version, version, version - 1, 0, 0, 0))
    intake.run_state(version, version)  # a checkpoint
    intake.acknowledge()
    assert len(trained) == len(set(trained)), "no session is trained twice"
    assert max(stream.given.values(), default=1) == 1, "no session has two verdicts"
    assert intake.backlog.waiting + len(stream.given) == opened, "no session is lost"


GENTLE = {"lr": 1e-3, "warmup_steps": 0}


def aged(make_harness: MakeHarness, stale: str, **algorithm: Any) -> Harness:
    """A trainer at version 5 that takes tokens of versions 3 and newer."""
    given = {"stale": stale, "max_staleness": 2} | algorithm
    return make_harness(stale, algorithm=given, initial_version=5, optimizer=GENTLE).start()


def episode(
    harness: Harness, session_id: str, value: float, versions: list[int], group_id: str = "g", **fields: Any
) -> None:
    """One turn of a group of two; one token by each version."""
    harness.agents.open(session_id, group_id, 2)
    spans = tuple(Span(version, place, place + 1) for place, version in enumerate(versions))
    output = [10 + place for place in range(len(versions))]
    harness.agents.call(turn(session_id, f"{session_id}-t", output_ids=output, versions=spans, **fields))
    harness.agents.finish(session_id, value)


def unfinished(harness: Harness, session_id: str, version: int, policy: str = "policy") -> None:
    """A session of another group that this version has sampled, and that goes on."""
    harness.agents.open(session_id, session_id, 2)
    sampled = turn(session_id, f"{session_id}-t", output_ids=[10, 11], version=version, policy=policy)
    harness.agents.call(sampled)


def pair_of_now(harness: Harness) -> None:
    episode(harness, "a", 1.0, [5])
    episode(harness, "b", 0.0, [5])


@pytest.mark.parametrize(
    ("stale", "versions"),
    [("drop", [2, 5, 5]), ("mask", [2, 1, 2])],
    ids=["one old token where rollouts are dropped", "only old tokens where tokens are masked"],
)
def test_a_rollout_is_stale(make_harness: MakeHarness, stale: str, versions: list[int]) -> None:
    harness = aged(make_harness, stale)
    episode(harness, "a", 1.0, versions)
    episode(harness, "b", 0.0, [5, 5, 5])
    assert not harness.trainer.run_once()
    assert harness.session_codes() == {"a": "stale", "b": "zero_advantage"}


def test_masked_tokens_are_not_trained_and_newer_ones_are(make_harness: MakeHarness) -> None:
    harness = aged(make_harness, "mask")
    episode(harness, "a", 1.0, [2, 2, 5])
    episode(harness, "b", 0.0, [5, 5, 5])
    assert harness.trainer.run_once()
    metrics = harness.told
    assert metrics["staleness/masked_frac"] == pytest.approx(2 / 6)
    assert metrics["is/masked_frac"] == pytest.approx(2 / 6)
    assert harness.session_codes() == {"a": "trained", "b": "trained"}


def test_corrected_tokens_are_trained_however_old(make_harness: MakeHarness) -> None:
    harness = aged(make_harness, "correct")
    episode(harness, "a", 1.0, [1, 1, 1])
    episode(harness, "b", 0.0, [5, 5, 5])
    assert harness.trainer.run_once()
    assert harness.told["staleness/total_max"] == 4.0
    assert harness.told["staleness/masked_frac"] == 0.0


@pytest.mark.parametrize(("most", "version"), [(2, 3), (0, 5)], ids=["some staleness", "synchronous"])
def test_a_step_waits_for_the_rollouts_that_it_would_make_too_old(
    make_harness: MakeHarness, most: int, version: int
) -> None:
    harness = aged(make_harness, "wait", max_staleness=most)
    unfinished(harness, "late", version)
    pair_of_now(harness)
    assert not harness.trainer.run_once()
    assert harness.waits_for.startswith("1 unfinished sessions, which the next step would make")
    harness.agents.finish("late", 1.0)
    harness.agents.episode("later", 0.0, group_id="late", size=2, version=5, output_ids=[12, 1])
    assert harness.trainer.run_once()
    assert set(harness.session_codes().values()) == {"trained"}


def test_a_step_does_not_wait_if_waiting_cannot_help(make_harness: MakeHarness) -> None:
    """One session stays young enough, one is too old already, one is an evaluation, and one has no reward and
    may never get one."""
    harness = aged(make_harness, "wait")
    unfinished(harness, "young", 4)
    unfinished(harness, "old", 2)
    unfinished(harness, "exam", 3, "policy@3")
    unfinished(harness, "poor", 3)
    harness.agents.finish("poor")
    pair_of_now(harness)
    assert harness.trainer.run_once()


def test_a_masked_outlier_does_not_drop_newer_tokens_of_its_row(make_harness: MakeHarness) -> None:
    """The masked token is an outlier, for which the mask of outliers would drop the whole row."""
    harness = aged(make_harness, "mask", masks=[{"name": "outlier", "low": 1e-4, "high": 100.0}])
    episode(harness, "a", 1.0, [1, 5, 5], logprobs=[-60.0, -4.0, -4.0])
    episode(harness, "b", 0.0, [5, 5, 5])
    assert harness.trainer.run_once()
    assert harness.told["is/masked_frac"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("measured", "mode"),
    [
        ({}, "correct"),
        ({"mismatch/ess": 0.9, "mismatch/k3": 0.01}, "correct"),
        ({"mismatch/ess": 0.4, "mismatch/k3": 0.01}, "mask"),
        ({"mismatch/ess": 0.9, "mismatch/k3": 0.2}, "mask"),
    ],
)
def test_auto_corrects_while_the_last_step_measured_well(measured: dict[str, float], mode: str) -> None:
    assert AlgorithmSettings(stale="auto").after(measured).stale == mode


def test_auto_masks_after_a_step_that_measured_badly(make_harness: MakeHarness) -> None:
    harness = aged(make_harness, "auto", auto_min_ess=0.99, auto_max_kl=100.0)
    episode(harness, "a", 1.0, [1, 1, 1])
    episode(harness, "b", 0.0, [5, 5, 5])
    assert harness.trainer.run_once()
    assert harness.told["mismatch/ess"] < 0.99
    episode(harness, "c", 1.0, [1, 1], "h")
    episode(harness, "d", 0.0, [6, 6], "h")
    assert not harness.trainer.run_once()
    assert harness.session_codes()["c"] == "stale"


@pytest.mark.parametrize(("intake", "ages"), [("newest", [0] * 6), ("oldest", [0, 1, 1, 2, 2, 2])])
def test_with_twice_the_traffic_that_can_be_trained_the_newest_rollouts_are(
    make_harness: MakeHarness, intake: str, ages: list[int]
) -> None:
    most = 2
    bounds = {"intake": intake, "max_staleness": most, "min_live_rows": 2, "max_rows": 2}
    harness = make_harness(algorithm=bounds).start()
    found = []
    for number in range(6):
        for half in (0, 1):
            versions = (Span(harness.trainer.version, 0, 3),)
            at = 100.0 + 2 * number + half
            harness.agents.group(f"g{number}-{half}", [1.0, 0.0], versions=versions, at=at)
        assert harness.trainer.run_once()
        found.append(harness.told["staleness/total_max"])
    assert found == ages
    codes = Counter(harness.session_codes().values())
    lost = "skipped_for_newer" if intake == "newest" else "stale"
    assert codes["trained"] == 2 * 6
    assert codes.keys() == {"trained", lost, None}
    assert codes[None] <= 2 * 2 * (most + 1)


def test_a_group_that_was_passed_over_is_trained_if_nothing_newer_is_there(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"min_live_rows": 2, "max_rows": 2}).start()
    for name, at in (("a", 101.0), ("b", 102.0)):
        harness.agents.group(name, [1.0, 0.0], at=at)
    assert harness.trainer.run_once()
    assert harness.session_codes() | {"a-0": None} == harness.session_codes()
    assert harness.trainer.run_once()
    assert set(harness.session_codes().values()) == {"trained"}
