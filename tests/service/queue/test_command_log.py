"""The command log on Redis: each command once, in the order of its model, whatever comes twice or too early;
its bytes are bounded, and a full log still lets one model reach its step."""

import itertools
import random
from typing import Any

import pytest
from redis import Redis

from rollout_queue.commands.codec import decode_answer, decode_command, encode
from rollout_queue.commands.command import (
    Command,
    CreateModel,
    ForwardBackward,
    LoggedCommand,
    LoraSpec,
    OptimStep,
    Refused,
    SaveForSampler,
    SaveWeights,
)
from rollout_queue.commands.datum import Datum
from rollout_queue.commands.log import BEGINNING
from rollout_queue.commands.result import Answer, CommandFailed, Passed, Published, Result, Saved, Stepped
from rollout_queue.contract.errors import InvalidRecord, LeaseLost, UnknownSchema
from rollout_queue.contract.tokens import Logprobs, TokenIds
from rollout_queue.redis import keys
from rollout_queue.redis.commands.reader import RedisCommandReader
from rollout_queue.redis.commands.submission import CommandSubmissions, Gone, Waiting

MOST = 100_000
"""Bytes that the fixture `log` holds."""
STEP = OptimStep(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)


def passes(tokens: int) -> ForwardBackward:
    """A command of about 12 bytes a token."""
    ids = TokenIds(range(tokens))
    return ForwardBackward("cross_entropy", {}, (Datum(ids, ids, 1, {"weights": Logprobs([1.0] * tokens)}),))


def numbers(reader: RedisCommandReader, model_id: str = "m") -> list[int]:
    return [each.number for each in reader.read(BEGINNING, 1000, 0.01) if each.model_id == model_id]


async def test_commands_in_any_order_twice_are_in_the_log_once_and_in_order(
    log: CommandSubmissions, reader: RedisCommandReader
) -> None:
    assert await log.open("m", "owner", b"spec") is None
    assert await log.open("m", "owner", b"other") == b"spec"
    sent = [*range(200), *range(200)]
    random.Random(3).shuffle(sent)
    said = [await log.submit("m", number, f"digest {number}", STEP) for number in sent]
    assert sorted(said) == ["known"] * 200 + ["new"] * 200
    assert numbers(reader) == list(range(200))
    assert await log.submit("m", 5, "another digest", STEP) == "other"
    assert await log.submit("n", 0, "digest", STEP) == "unknown"
    assert await log.submit("m", 200 + 10_001, "digest", STEP) == "far"


async def test_a_command_waits_for_those_before_it(
    log: CommandSubmissions, reader: RedisCommandReader
) -> None:
    await log.open("m", "owner", b"")
    for number in (2, 1, 4):
        await log.submit("m", number, str(number), STEP)
    assert numbers(reader) == []
    await log.submit("m", 0, "0", CreateModel("base", LoraSpec(8)))
    assert numbers(reader) == [0, 1, 2]
    await log.submit("m", 3, "3", Refused("no"))
    assert numbers(reader) == [0, 1, 2, 3, 4]
    read = reader.read(BEGINNING, 10, 0.01)
    assert [each.command for each in read[:2]] == [CreateModel("base", LoraSpec(8)), STEP]
    assert [each.number for each in reader.read(read[2].position, 10, 0.01)] == [3, 4]


async def test_a_result_is_read_many_times_and_the_first_one_stays(
    log: CommandSubmissions, reader: RedisCommandReader, redis: Redis
) -> None:
    await log.open("m", "owner", b"")
    await log.submit("m", 0, "0", passes(3))
    (command,) = reader.read(BEGINNING, 10, 0.01)
    assert isinstance(await log.result("m", 0), Waiting)
    assert isinstance(await log.result("m", 1), Gone)
    assert isinstance(await log.result("other", 0), Gone)
    assert reader.answered([command.request_id, "m:1"]) == [False, False]
    passed = Passed((Logprobs([-1.5, -0.25, -2.0]),), 1, {"loss:sum": 3.75})
    reader.answer(command, passed)
    reader.answer(command, CommandFailed("later", "server"))
    assert reader.answered([command.request_id, "m:1"]) == [True, False]
    for _ in range(3):
        assert await log.result("m", 0) == Answer(passed)
    redis.delete(keys.result(command.request_id))  # it expires
    assert isinstance(await log.result("m", 0), Gone), "nobody waits for a result that was there"


async def test_what_lasts_is_found_by_its_name(log: CommandSubmissions, reader: RedisCommandReader) -> None:
    await log.open("m", "owner", b"")
    save, sampler = SaveWeights("a"), SaveForSampler("b")
    commands: list[Command] = [save, sampler, SaveWeights("c")]
    for number, command in enumerate(commands):
        await log.submit("m", number, str(number), command)
    results: list[Result] = [Saved(10), Published("m", 1, "/there"), CommandFailed("no", "user")]
    for logged, result in zip(reader.read(BEGINNING, 10, 0.01), results, strict=True):
        reader.answer(logged, result)
    kept = await log.kept("m")
    assert {name: (each.made, each.number) for name, each in kept.items()} == {
        "weights/a": (Saved(10), 0),
        "sampler_weights/b": (Published("m", 1, "/there"), 1),
    }
    assert await log.kept_as("m", "weights/a") == kept["weights/a"]
    assert await log.kept_as("m", "weights/c") is None
    assert await log.result("m", 1) == Answer(results[1], sampler)


async def test_only_the_trainer_with_the_lease_answers(
    log: CommandSubmissions, reader: RedisCommandReader, redis: Redis
) -> None:
    await log.open("m", "owner", b"")
    await log.submit("m", 0, "0", STEP)
    (command,) = reader.read(BEGINNING, 10, 0.01)
    redis.set(keys.FENCE, "another")
    with pytest.raises(LeaseLost):
        reader.answer(command, Stepped({}))
    with pytest.raises(LeaseLost):
        reader.free(command.position)
    assert isinstance(await log.result("m", 0), Waiting)


async def test_a_full_log_takes_small_commands_and_is_freed_by_checkpoints(
    log: CommandSubmissions, reader: RedisCommandReader
) -> None:
    for name in ("m", "n"):
        await log.open(name, "owner", b"")
    size = len(encode(passes(1000)))
    for number in itertools.count():
        said = await log.submit("n", number, "d", passes(1000))
        if reader.held_bytes()[0] + size > MOST:
            break
        assert said == "new"
    last = number
    assert await log.submit("m", 0, "0", passes(1000)) == "full", "n is first"
    assert await log.submit("m", 0, "0", STEP) == "new", "a small command"
    assert await log.submit("m", 2, "2", passes(1000)) == "full"
    await log.open("o", "owner", b"")
    small = [await log.submit("o", number, str(number), passes(1)) for number in range(200)]
    assert small[-1] == "full", "also a small one, if it has data"
    assert await log.submit("n", last + 1, "d", passes(1000)) == "new", "n may go on to its step"
    assert await log.submit("n", last + 3, "d", passes(1)) == "new", "also with what comes early"
    assert await log.submit("n", last + 2, "d", passes(1)) == "new"
    for number in itertools.count(last + 4):
        said = await log.submit("n", number, "d", passes(1000))
        if said != "new":
            break
    assert (said, reader.held_bytes()[0] <= 2 * MOST) == ("too large", True)
    assert await log.submit("n", number, "d", Refused("one step needs more than the log may hold")) == "new"
    reader.free(reader.read(BEGINNING, 10_000, 0.01)[-1].position)
    assert (reader.held_bytes(), numbers(reader)) == ((0, MOST), [])
    assert await log.submit("m", 1, "1", passes(1000)) == "new"


async def test_results_that_nobody_reads_fill_the_log_too(
    log: CommandSubmissions, reader: RedisCommandReader, redis: Redis
) -> None:
    await log.open("m", "owner", b"")
    await log.open("n", "owner", b"")
    await log.submit("n", 0, "0", STEP)
    await log.submit("m", 0, "0", STEP)
    first, second = reader.read(BEGINNING, 10, 0.01)
    reader.answer(second, Passed((Logprobs([-1.0] * 30_000),), 1, {"loss:sum": 1.0}))
    assert await log.is_full()
    assert await log.submit("m", 1, "1", passes(1000)) == "full"
    assert isinstance(await log.result("m", 0), Answer)
    assert not await log.is_full()
    assert await log.submit("m", 1, "1", passes(1000)) == "new"
    reader.answer(first, Passed((Logprobs([-1.0] * 30_000),), 1, {"loss:sum": 1.0}))
    assert await log.submit("m", 2, "2", passes(1000)) == "full"
    unread: Any = redis.zrange(keys.RESULTS_UNREAD, 0, -1)
    redis.zadd(keys.RESULTS_UNREAD, dict.fromkeys(unread, 1.0))  # they expire
    assert await log.submit("m", 2, "2", passes(1000)) == "new"


async def test_a_command_of_a_newer_build_is_refused_and_the_next_ones_run(
    log: CommandSubmissions, reader: RedisCommandReader, redis: Redis
) -> None:
    redis.xadd(keys.COMMANDS, {"m": "m", "n": 0, "c": b"\x63future"})
    (command,) = reader.read(BEGINNING, 10, 0.01)
    assert isinstance(command.command, Refused)
    assert isinstance(command, LoggedCommand)


def test_records_survive_their_bytes() -> None:
    commands: list[Command] = [passes(3), STEP, CreateModel("b", None), Refused("no")]
    for command in commands:
        assert decode_command(encode(command)) == command
    results: list[Result] = [Stepped({"grad_norm": 1.0}), Passed((Logprobs([-1.0]),), 1, {"loss:sum": 1.0})]
    for result in results:
        assert decode_answer(encode(Answer(result))) == Answer(result)
    for packed, error in ((b"", InvalidRecord), (b"\x02", UnknownSchema), (b"\x01\xc1", InvalidRecord)):
        with pytest.raises(error):
            decode_command(packed)
        with pytest.raises(error):
            decode_answer(packed)


def test_a_datum_that_contradicts_itself_is_refused() -> None:
    ids, ones = TokenIds([1, 2]), Logprobs([1.0, 1.0])
    for arguments in (
        (ids, TokenIds([1])),
        (TokenIds(), TokenIds()),
        (ids, ids, 2),
        (ids, ids, 1, {"weights": Logprobs([1.0])}),
        (ids, ids, 1, {"weights": Logprobs([1.0, float("nan")])}),
        (ids, ids, 0),
    ):
        with pytest.raises(InvalidRecord):
            Datum(*arguments)
    assert len(Datum(ids, TokenIds([1, 2, 3, 4]), 2, {"weights": Logprobs([1.0] * 4)})) == 2
    assert ones.finite


async def test_a_model_that_ends_leaves_nothing_in_the_log(
    log: CommandSubmissions, reader: RedisCommandReader
) -> None:
    await log.open("m", "owner", b"")
    await log.submit("m", 0, "0", STEP)
    held = reader.held_bytes()[0]
    for number in (2, 3, 7):
        await log.submit("m", number, str(number), passes(100))
    assert await log.end("m", "it is over")
    assert not await log.end("m", "again")
    assert not await log.end("nobody", "it is over")
    assert reader.held_bytes()[0] == held, "the early ones are gone"
    await log.open("lives", "owner", b"")
    assert reader.ended([]) == {}
    assert reader.ended(["m", "lives"]) == {"m": "it is over"}
    assert await log.submit("m", 1, "1", STEP) == "ended"
    assert numbers(reader) == [0]


async def test_ended_models_leave_nothing_but_their_own_records(
    log: CommandSubmissions, reader: RedisCommandReader, redis: Redis
) -> None:
    def size() -> int:
        return sum(
            redis.memory_usage(key) or 0 for key in redis.scan_iter() if not key.startswith(b"weir:m:")
        )

    names = [f"m{number}" for number in range(50)]
    for name in names:
        await log.open(name, "owner", b"")
    before = size()
    for name in names:
        assert await log.end(name, "it is over")
    assert size() <= before, "no list of all that ever ended grows"
    assert reader.ended(names) == dict.fromkeys(names, "it is over")
    for name in names:
        assert await log.submit(name, 0, "0", STEP) == "ended"


async def test_a_model_whose_record_is_removed_has_ended_and_keeps_nothing(
    log: CommandSubmissions, reader: RedisCommandReader, redis: Redis
) -> None:
    await log.open("m", "owner", b"")
    await log.submit("m", 0, "0", SaveWeights("a"))
    (command,) = reader.read(BEGINNING, 10, 0.01)
    redis.delete(keys.model("m"))
    assert set(reader.ended(["m"])) == {"m"}
    reader.answer(command, Saved(10))
    assert (await log.kept("m"), redis.exists(keys.model("m"))) == ({}, 0)


async def test_a_full_redis_accepts_answers_and_frees_the_log(
    log: CommandSubmissions, reader: RedisCommandReader, redis: Redis
) -> None:
    await log.open("m", "owner", b"")
    await log.submit("m", 0, "0", STEP)
    (command,) = reader.read(BEGINNING, 10, 0.01)
    redis.config_set("maxmemory", 1)
    try:
        reader.answer(command, Stepped({"grad_norm": 1.0}))
        reader.free(command.position)
    finally:
        redis.config_set("maxmemory", 0)
    assert await log.result("m", 0) == Answer(Stepped({"grad_norm": 1.0}))
