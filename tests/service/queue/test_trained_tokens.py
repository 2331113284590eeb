"""What a step used of each trained token lies beside the turn's verdict, and goes with its session."""

import struct
from typing import Any

import msgspec
import pytest

from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.packed_tokens import TrainedTokens
from rollout_queue.contract.published_policy import PolicyRecord, TrainedStep
from rollout_queue.contract.records import Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import key_names
from rollout_queue.redis.session_lists import heads_without_tokens, is_known, steps_of, trained_sessions
from tests.support.queue.ends import Ends
from tests.support.queue.records import spec, turn


def packed(advantages: list[float] | None, ratios: list[float] | None, tokens: int = 2) -> bytes:
    def of(values: list[float] | None, kind: str) -> bytes | None:
        return None if values is None else struct.pack(f"<{len(values)}{kind}", *values)

    return TrainedTokens(tokens, of(advantages, "f"), of(ratios, "e")).pack()


def step(version: int, base: int) -> TrainedStep:
    return TrainedStep(step=version, version=version, base=base, turns=1, sessions=1, tokens=2)


def trained(version: int, *names: str, tokens: bytes = packed([0.5], [1.0, 1.25])) -> Verdicts:
    """The verdicts of a step that trained the one turn of each of these sessions."""
    verdict = Verdict(code="trained", step=version, version=version)
    turns = {(name, f"{name}-t0"): verdict for name in names}
    return Verdicts(
        dict.fromkeys(names, verdict), turns, dict.fromkeys(turns, tokens), [step(version, version - 1)]
    )


def traces(stream: Ends, name: str) -> list[str]:
    """The keys whose names or contents have the name of the session."""
    found = []
    for key in stream.redis.scan_iter():
        dump: Any = stream.redis.dump(key)
        if name.encode() in key + dump:
            found.append(key.decode())
    return sorted(found)


def test_numbers_come_back_as_they_were_packed() -> None:
    each = TrainedTokens.unpack(packed([0.5, -0.25, 0.0], [1.0, float("nan"), 65504.0], tokens=3))
    assert each.advantage_list == [0.5, -0.25, 0.0]
    assert each.advantage_mean == pytest.approx(0.25 / 3)
    assert each.ratio_list == [1.0, None, 65504.0]
    same = TrainedTokens.unpack(packed([0.5], None, tokens=3))
    assert (same.advantage_list, same.advantage_mean, same.ratio_list) == ([0.5] * 3, 0.5, None)
    nothing = TrainedTokens.unpack(packed(None, None, tokens=3))
    assert (nothing.advantage_list, nothing.advantage_mean, nothing.ratio_list) == (None, None, None)


def test_numbers_of_another_turn_or_build_are_refused() -> None:
    for broken in (TrainedTokens(1).pack()[:-1], b"\x01", b"\x01\x93\x02\xc4\x01a\xc0"):
        with pytest.raises(InvalidRecord):
            TrainedTokens.unpack(broken)
    with pytest.raises(InvalidRecord):
        packed([0.5, 0.5], None, tokens=3)
    with pytest.raises(InvalidRecord):
        packed(None, [1.0], tokens=2)
    for newer in (b"\x02", b""):
        with pytest.raises(UnknownSchema):
            TrainedTokens.unpack(newer)


async def test_numbers_reach_the_head_with_the_verdict(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_turn(turn("s1-t0"), 200.0)
    (entry,) = ends.reader.read(10, 0.01)
    for _ in range(2):  # the answer was lost
        ends.reader.acknowledge([entry.entry_id], trained(4, "s1"))
    head = await ends.head()
    assert head.trained_tokens == {"s1-t0": packed([0.5], [1.0, 1.25])}
    without = await ends.writer.load("s1", turns=False)
    assert without is not None
    assert without.trained_tokens == {}
    stored: Any = ends.redis.zrange(key_names.STEPS, 0, -1)
    assert [msgspec.json.decode(each, type=TrainedStep) for each in stored] == [step(4, 3)]


async def test_a_deleted_session_gets_no_verdict_and_no_numbers(ends: Ends) -> None:
    ends.reader.acknowledge([], trained(4, "gone"))
    assert await ends.writer.load("gone") is None
    assert ends.counts() == {}
    assert not ends.redis.exists(key_names.session("gone"), key_names.TRAINED)


async def test_numbers_stay_out_of_the_heads_in_memory(stream: Ends) -> None:
    """No call reads them, and they would take memory that calls need. A former build reads the session: a
    build that knows no field of a newer one leaves it out."""
    await stream.episode("s1")
    stream.acknowledge(trained(4, "s1"))
    for _ in range(2):  # read from Redis, and from memory
        assert (await stream.called()).trained_tokens == {}
    assert stream.writer.head_lookups == (1, 1)
    stream.redis.hset(key_names.session("s1"), "x:newer", b"\x07")
    assert [each.turn_id for each in (await stream.head()).turns] == ["s1-t0"]


async def test_deletion_leaves_nothing_of_what_was_trained(stream: Ends) -> None:
    for name in ("private-1", "private-2"):
        await stream.episode(name, user="ada")
    stream.acknowledge(trained(4, "private-1", "private-2"))
    assert await trained_sessions(stream.client, 4) == ["private-1", "private-2"]
    await stream.deleter.delete_session("private-1")
    assert await trained_sessions(stream.client, 4) == ["private-2"]
    await stream.deleter.delete_user("ada")
    assert await trained_sessions(stream.client, 4) == []
    left = {
        key_names.SESSIONS,
        key_names.DELETED,
        key_names.STREAM,
    }  # its id, its tombstone, and its deletion
    assert set(traces(stream, "private-2")) <= left
    assert [each.turns for each in await steps_of(stream.client, 4)] == [1]


async def test_retention_leaves_nothing_of_what_was_trained(stream: Ends) -> None:
    await stream.episode("old")
    stream.acknowledge(trained(4, "old"))
    assert (await stream.forgetter.forget(0.0, 10)).verdicts == {"trained": 1}
    assert await trained_sessions(stream.client, 4) == []
    assert traces(stream, "s:old") == [key_names.FORGOTTEN_IDS]


async def test_what_a_former_build_has_removed_leaves_the_index(stream: Ends) -> None:
    """It removes heads, and knows no index of trained sessions."""
    for name in ("kept", "old"):
        await stream.episode(name)
    stream.acknowledge(trained(4, "kept", "old"))
    stream.redis.delete(key_names.session("old"))
    await stream.forgetter.adopt()
    assert await trained_sessions(stream.client, 4) == ["kept"]


async def test_a_full_redis_still_takes_the_acknowledgement(stream: Ends) -> None:
    await stream.episode("s1")
    stream.redis.config_set("maxmemory", 1)
    stream.acknowledge(trained(4, "s1"))
    assert await trained_sessions(stream.client, 4) == ["s1"]
    head = (await heads_without_tokens(stream.client, ["s1"]))["s1"]
    assert head.trained_tokens == {"s1-t0": packed([0.5], [1.0, 1.25])}


async def test_a_version_is_traced_back_to_the_registered_one_before(stream: Ends) -> None:
    for version in (4, 5, 6, 7, 7):  # a step that is stored again is stored once
        stream.acknowledge(trained(version))
    assert stream.redis.zcard(key_names.STEPS) == 4
    for version in (4, 7):
        record = PolicyRecord(version=version, location=None, created_at=1.0)
        stream.redis.hset(key_names.POLICIES, str(version), msgspec.json.encode(record))
    assert [each.version for each in await steps_of(stream.client, 7)] == [5, 6, 7]
    assert [each.version for each in await steps_of(stream.client, 4)] == [4]
    stream.redis.sadd(key_names.REMOVED, "5")
    assert [each.version for each in await steps_of(stream.client, 7)] == [6, 7]
    assert [await is_known(stream.client, version) for version in (3, 5, 6, 7, 8)] == [
        False, True, True, True, False,
    ]  # fmt: skip


async def test_undone_steps_are_no_part_of_what_came_after(stream: Ends) -> None:
    """Version 8 restored the weights of version 4, so steps 5 to 7 are not in version 9."""
    for version, base in [(5, 4), (6, 5), (7, 6), (9, 8)]:
        stream.acknowledge(Verdicts({}, {}, steps=[step(version, base)]))
    assert [each.version for each in await steps_of(stream.client, 9)] == [9]
    assert await steps_of(stream.client, 8) == []


async def test_a_long_chain_is_read_in_parts(stream: Ends) -> None:
    stream.acknowledge(Verdicts({}, {}, steps=[step(version, version - 1) for version in range(1, 201)]))
    assert [each.version for each in await steps_of(stream.client, 200)] == list(range(1, 201))
