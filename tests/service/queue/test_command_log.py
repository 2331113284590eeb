"""The command log on Redis: each command once, in the order of its model, whatever comes twice or too early;
its bytes are bounded, and a full log still lets one model reach its step."""

import itertools
import random
from typing import Any

import pytest
from redis import Redis

from rollout_queue.contract.errors import LeaseLost
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.redis import key_names
from rollout_queue.redis.command_log import CommandReader, CommandSubmissions, Gone, Waiting
from rollout_queue.trainer_commands import (
    BEGINNING,
    Answer,
    Command,
    CommandFailed,
    CreateModel,
    Datum,
    Drop,
    Dropped,
    ForwardBackward,
    LoggedCommand,
    LoraSpec,
    OptimStep,
    Passed,
    Published,
    Refused,
    Result,
    Saved,
    SaveForSampler,
    SaveWeights,
    Stepped,
    encode,
)

MOST = 100_000
"""Bytes that the fixture `log` holds."""
STEP = OptimStep(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)


def passes(tokens: int) -> ForwardBackward:
    """A command of about 12 bytes a token."""
    ids = TokenIds(range(tokens))
    return ForwardBackward("cross_entropy", {}, (Datum(ids, ids, 1, {"weights": Logprobs([1.0] * tokens)}),))


async def logged(log: CommandSubmissions, reader: CommandReader, *commands: Command) -> list[LoggedCommand]:
    await log.open("m", "owner", b"")
    for number, command in enumerate(commands):
        await log.submit("m", number, str(number), command)
    return list(reader.read(BEGINNING, 100, 0.01))


def numbers(reader: CommandReader, model_id: str = "m") -> list[int]:
    return [each.number for each in reader.read(BEGINNING, 1000, 0.01) if each.model_id == model_id]


async def test_commands_in_any_order_twice_are_in_the_log_once_and_in_order(
    log: CommandSubmissions, reader: CommandReader
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


async def test_a_command_waits_for_those_before_it(log: CommandSubmissions, reader: CommandReader) -> None:
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
    log: CommandSubmissions, reader: CommandReader, redis: Redis
) -> None:
    (command,) = await logged(log, reader, passes(3))
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
    redis.delete(key_names.result(command.request_id))  # it expires
    assert isinstance(await log.result("m", 0), Gone), "nobody waits for a result that was there"


async def test_what_lasts_is_found_by_its_name(log: CommandSubmissions, reader: CommandReader) -> None:
    sampler = SaveForSampler("b")
    commands = await logged(log, reader, SaveWeights("a"), sampler, SaveWeights("c"))
    results: list[Result] = [Saved(10), Published("m", 1, "/there"), CommandFailed("no", "user")]
    for command, result in zip(commands, results, strict=True):
        reader.answer(command, result)
    kept = await log.kept("m")
    assert {name: (each.made, each.number) for name, each in kept.items()} == {
        "weights/a": (Saved(10), 0),
        "sampler_weights/b": (Published("m", 1, "/there"), 1),
    }
    assert await log.kept_as("m", "weights/a") == kept["weights/a"]
    assert await log.kept_as("m", "weights/c") is None
    assert await log.result("m", 1) == Answer(results[1], sampler)


async def test_only_the_trainer_with_the_lease_answers(
    log: CommandSubmissions, reader: CommandReader, redis: Redis
) -> None:
    (command,) = await logged(log, reader, STEP)
    redis.set(key_names.FENCE, "another")
    with pytest.raises(LeaseLost):
        reader.answer(command, Stepped({}))
    with pytest.raises(LeaseLost):
        reader.free(command.position)
    assert isinstance(await log.result("m", 0), Waiting)


async def test_a_full_log_takes_small_commands_and_is_freed_by_checkpoints(
    log: CommandSubmissions, reader: CommandReader
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
    log: CommandSubmissions, reader: CommandReader, redis: Redis
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
    unread: Any = redis.zrange(key_names.RESULTS_UNREAD, 0, -1)
    redis.zadd(key_names.RESULTS_UNREAD, dict.fromkeys(unread, 1.0))  # they expire
    assert await log.submit("m", 2, "2", passes(1000)) == "new"


async def test_a_command_of_a_newer_build_is_refused_and_the_next_ones_run(
    log: CommandSubmissions, reader: CommandReader, redis: Redis
) -> None:
    redis.xadd(key_names.COMMANDS, {"m": "m", "n": 0, "c": b"\x63future"})
    (command,) = reader.read(BEGINNING, 10, 0.01)
    assert isinstance(command.command, Refused)
    assert isinstance(command, LoggedCommand)


async def test_a_model_that_ends_leaves_nothing_in_the_log(
    log: CommandSubmissions, reader: CommandReader
) -> None:
    await logged(log, reader, STEP)
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
    log: CommandSubmissions, redis: Redis
) -> None:
    def size() -> int:
        others = (key for key in redis.scan_iter() if not key.startswith(b"weir:m:"))
        return sum(redis.memory_usage(key) or 0 for key in others)

    names = [f"m{number}" for number in range(50)]
    for name in names:
        await log.open(name, "owner", b"")
    before = size()
    for name in names:
        assert await log.end(name, "it is over")
    assert size() <= before, "no list of all that ever ended grows"


async def test_a_model_whose_record_is_removed_has_ended_and_keeps_nothing(
    log: CommandSubmissions, reader: CommandReader, redis: Redis
) -> None:
    (command,) = await logged(log, reader, SaveWeights("a"))
    redis.delete(key_names.model("m"))
    assert set(reader.ended(["m"])) == {"m"}
    reader.answer(command, Saved(10))
    assert (await log.kept("m"), redis.exists(key_names.model("m"))) == ({}, 0)


async def test_a_full_redis_accepts_answers_and_frees_the_log(
    log: CommandSubmissions, reader: CommandReader, redis: Redis
) -> None:
    (command,) = await logged(log, reader, STEP)
    redis.config_set("maxmemory", 1)
    reader.answer(command, Stepped({"grad_norm": 1.0}))
    reader.free(command.position)
    assert await log.result("m", 0) == Answer(Stepped({"grad_norm": 1.0}))


# What commands have made is deleted at a place in the log, whatever is answered again later


async def test_deleted_weights_stay_deleted_when_a_replay_answers_again(
    log: CommandSubmissions, reader: CommandReader
) -> None:
    first, second, last = await logged(log, reader, SaveWeights("x"), SaveWeights("x", overwrite=True), STEP)
    reader.answer(first, Saved(1))
    reader.answer(second, Saved(2))
    assert not await log.drop("m", "weights/x", first.number), "it is overwritten"
    assert await log.drop("m", "weights/x", second.number)
    assert not await log.drop("m", "weights/x", second.number)
    assert reader.dropped() == Dropped({("m", "weights/x"): [Drop(second.position, last.position)]}, {})
    for again in (first, second):
        reader.answer(again, Saved(3))
        assert await log.kept("m") == {}
    await log.submit("m", 3, "3", SaveWeights("x"))
    (third,) = reader.read(last.position, 100, 0.01)
    reader.answer(third, Saved(4))
    assert (await log.kept("m"))["weights/x"].made == Saved(4), "what is saved later is there"
    assert await log.drop("m", "weights/x", third.number)
    assert len(reader.dropped().weights["m", "weights/x"]) == 2
    reader.forget_weights("m", "weights/x", last.position)
    drops = Drop(third.position, third.position)
    assert reader.dropped().weights == {("m", "weights/x"): [drops]}
    reader.forget_weights("m", "weights/x", third.position)
    assert reader.dropped().weights == {}


async def test_a_deletion_spares_what_is_logged_and_not_yet_saved(
    log: CommandSubmissions, reader: CommandReader
) -> None:
    first, second = await logged(log, reader, SaveWeights("x"), SaveWeights("x", overwrite=True))
    reader.answer(first, Saved(1))
    await log.drop("m", "weights/x", first.number)
    reader.answer(second, Saved(2))
    assert (await log.kept("m"))["weights/x"].made == Saved(2)


async def test_versions_that_nobody_can_name_are_noted(
    log: CommandSubmissions, reader: CommandReader
) -> None:
    made = await logged(log, reader, *(SaveForSampler(name) for name in ("s", "s", "~1", "~2")))
    results: list[Result] = [Published("a", version, "/there") for version in (1, 2, 3, 4)]
    for command, result in zip(made[:3], results[:3], strict=True):
        reader.answer(command, result)
    replaced = "sampler_weights/~replaced-0"
    reader.answer(made[0], results[0])
    kept = {name: each.made for name, each in (await log.kept("m")).items()}
    assert kept == {
        "sampler_weights/s": results[1],
        replaced: results[0],
        "sampler_weights/~1": results[2],
    }, "samples of the first one may wait"
    assert reader.dropped().adapters == {}
    await log.end("m", "its client session has finished")
    reader.answer(made[3], results[3])
    assert set(await log.kept("m")) == set(kept), "the client of the last one has gone"
    noted = {("a", 4): made[3].position}
    assert reader.dropped().adapters == noted
    await log.drop("m", replaced, made[0].number)
    await log.drop("m", "sampler_weights/s", made[1].number)
    noted |= {("a", 1): made[0].position, ("a", 2): made[1].position}
    assert reader.dropped().adapters == noted
    for version in (1, 2, 4):
        reader.forget_adapter("a", version)
    assert reader.dropped().adapters == {}


async def test_weights_are_listed_by_the_end_of_their_time(
    log: CommandSubmissions, reader: CommandReader, redis: Redis
) -> None:
    first, second = await logged(log, reader, SaveWeights("x"), SaveWeights("x", overwrite=True))
    redis.hset(key_names.kept_terms("m"), "weights/x#0", '{"ttl_s":3600}')
    reader.answer(first, Saved(1))
    created_at = (await log.kept("m"))["weights/x"].created_at
    (found,) = redis.zrange(key_names.KEPT_EXPIRES, 0, -1, withscores=True)
    assert found == (b"m|weights/x|0", pytest.approx(created_at + 3600, abs=0.01))
    reader.answer(first, Saved(1))
    assert redis.zrange(key_names.KEPT_EXPIRES, 0, -1, withscores=True) == [found], (
        "a replay gives no new time"
    )
    reader.answer(second, Saved(2))
    assert redis.zcard(key_names.KEPT_EXPIRES) == 0
    assert redis.hlen(key_names.kept_terms("m")) == 0
