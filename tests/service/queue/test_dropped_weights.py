"""What commands have made is deleted at a place in the log, whatever is answered again later."""

import pytest
from redis import Redis

from rollout_queue.commands.command import Command, LoggedCommand, OptimStep, SaveForSampler, SaveWeights
from rollout_queue.commands.log import BEGINNING, Drop, Dropped
from rollout_queue.commands.result import Published, Result, Saved
from rollout_queue.redis import keys
from rollout_queue.redis.commands.reader import RedisCommandReader
from rollout_queue.redis.commands.submission import CommandSubmissions

STEP = OptimStep(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)


async def logged(
    log: CommandSubmissions, reader: RedisCommandReader, *commands: Command
) -> list[LoggedCommand]:
    await log.open("m", "owner", b"")
    for number, command in enumerate(commands):
        await log.submit("m", number, str(number), command)
    return list(reader.read(BEGINNING, 100, 0.01))


async def test_deleted_weights_stay_deleted_when_a_replay_answers_again(
    log: CommandSubmissions, reader: RedisCommandReader
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
    log: CommandSubmissions, reader: RedisCommandReader
) -> None:
    first, second = await logged(log, reader, SaveWeights("x"), SaveWeights("x", overwrite=True))
    reader.answer(first, Saved(1))
    await log.drop("m", "weights/x", first.number)
    reader.answer(second, Saved(2))
    assert (await log.kept("m"))["weights/x"].made == Saved(2)


async def test_versions_that_nobody_can_name_are_noted(
    log: CommandSubmissions, reader: RedisCommandReader
) -> None:
    commands: list[Command] = [
        SaveForSampler("s"),
        SaveForSampler("s"),
        SaveForSampler("~1"),
        SaveForSampler("~2"),
    ]
    made = await logged(log, reader, *commands)
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
    log: CommandSubmissions, reader: RedisCommandReader, redis: Redis
) -> None:
    first, second = await logged(log, reader, SaveWeights("x"), SaveWeights("x", overwrite=True))
    redis.hset(keys.kept_terms("m"), "weights/x#0", '{"ttl_s":3600}')
    reader.answer(first, Saved(1))
    created_at = (await log.kept("m"))["weights/x"].created_at
    (found,) = redis.zrange(keys.KEPT_EXPIRES, 0, -1, withscores=True)
    assert found == (b"m|weights/x|0", pytest.approx(created_at + 3600, abs=0.01))
    reader.answer(first, Saved(1))
    assert redis.zrange(keys.KEPT_EXPIRES, 0, -1, withscores=True) == [found], "a replay gives no new time"
    reader.answer(second, Saved(2))
    assert redis.zcard(keys.KEPT_EXPIRES) == 0
    assert redis.hlen(keys.kept_terms("m")) == 0
