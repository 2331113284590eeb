"""A run of as many sessions as a test of size needs, in Redis.

templates ── StreamWriter ──▶ Redis ── a script copies them under other ids ──▶ a run of N sessions

The copies are what the writer would have stored: their ids have the same length, and each stands wherever the
template's stood. So 100,000 sessions take a minute to make. The stream is emptied, as a trainer leaves it.
"""

import asyncio
import time
from typing import Any

import msgspec
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from rollout_queue.contract.codec import encode
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Outcome, Reward, SessionSpec, Span, Turn, Verdict
from rollout_queue.redis import key_names
from rollout_queue.redis.lua import Script
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.redis_process import RedisProcess

TURNS, GROUP = 10, 8
CONTEXT, OUTPUT = 60, 40
TASKS = 50
COPIES_AT_ONCE = 25

COPY = Script[None]("""
-- KEYS: template, sessions, settled
-- ARGV: its id and group, as patterns; prefixes of sessions and groups; for each copy: id, group, time, spec
local fields = redis.call('HGETALL', KEYS[1])
for at = 5, #ARGV, 4 do
    local id, group, time, spec = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
    local copied = {}
    for field = 1, #fields, 2 do
        copied[field] = string.gsub(fields[field], ARGV[1], id)
        copied[field + 1] = string.gsub(string.gsub(fields[field + 1], ARGV[1], id), ARGV[2], group)
        if fields[field] == 'spec' then copied[field + 1] = spec end
    end
    redis.call('HSET', ARGV[3] .. id, unpack(copied))
    redis.call('ZADD', KEYS[2], time, id)
    redis.call('ZADD', KEYS[3], time * 1000, id)
    redis.call('HSET', ARGV[4] .. group, 'size', '8', 'owner', '')
    redis.call('SADD', ARGV[4] .. group .. ':members', id)
end
""")


def fill(redis: RedisProcess, sessions: int, began: float) -> None:
    """Store the run, and print what it takes."""
    started, last = time.perf_counter(), key_names.session(session_name(sessions - 1))
    asyncio.run(_write(redis.url, began))
    copy_templates(redis.client, sessions, began)
    note_trained(redis.client, sessions)
    redis.client.delete(key_names.STREAM, key_names.DEADLINES)
    facts: Any = redis.client.info("memory")
    made = f"{sessions} sessions, {sessions * TURNS} turns in {time.perf_counter() - started:.0f} s"
    print(f"{made}; Redis has {facts['used_memory'] / 2**20:.0f} MiB")
    whole: Any = redis.client.memory_usage(last, samples=0)
    sums: Any = redis.client.hget(last, "turns")
    redis.client.hdel(last, "turns")
    without: Any = redis.client.memory_usage(last, samples=0)
    redis.client.hset(last, "turns", sums)
    print(f"a session takes {whole} bytes, {whole - without} of them for the sums over its turns")


def session_name(number: int) -> str:
    return f"run-{number:010d}"


def group_name(number: int) -> str:
    return f"grp-{number // GROUP:010d}"


def spec_of(number: int, began: float) -> SessionSpec:
    return SessionSpec(
        session_id=session_name(number),
        task_id=f"task-{number // GROUP % TASKS:03d}",
        group_id=group_name(number),
        group_size=GROUP,
        user=f"user-{number % 20:02d}",
        created_at=began + number,
        metadata={"suite": "bench", "difficulty": number % 5},
    )


def trained(number: int) -> bool:
    return number % 4 > 0


def version_of(number: int) -> int:
    """The version that a step made of the session, or of the one that it copies."""
    return number % (TASKS * GROUP)


async def write_templates(redis: AsyncRedis, began: float) -> None:
    """The sessions of one group of each task, through the real writer."""
    writer = StreamWriter(redis)
    for number in range(TASKS * GROUP):
        spec = spec_of(number, began)
        await writer.open_session(spec)
        for place in range(TURNS):
            await writer.append_turn(turn_of(spec, place), expires_at=spec.created_at + 1e9)
        reward = Reward(
            session_id=spec.session_id, value=number % 5 / 4, key="finish", created_at=spec.created_at
        )
        outcome = Outcome(session_id=spec.session_id, status="completed", created_at=spec.created_at)
        code: Any = "trained" if trained(number) else "zero_advantage"
        version = version_of(number)
        verdict = Verdict(code=code, detail="all rewards are equal", step=version, version=version)
        await writer.append_outcome(outcome, reward, verdict)
        turns = {
            f"v:{turn_name(spec.session_id, place)}": msgspec.json.encode(verdict) for place in range(TURNS)
        }
        await redis.hset(key_names.session(spec.session_id), mapping=turns)  # type: ignore[arg-type]
    await writer.close()


def turn_name(session_id: str, place: int) -> str:
    return f"turn-{session_id}-{place:03d}"


def turn_of(spec: SessionSpec, place: int) -> Turn:
    return Turn(
        turn_id=turn_name(spec.session_id, place),
        session_id=spec.session_id,
        parent_id=turn_name(spec.session_id, place - 1) if place else None,
        group_id=spec.group_id,
        task_id=spec.task_id,
        relation="extends" if place else "root",
        context_ids=TokenIds(40 + (place * 7 + i) % 200 for i in range(CONTEXT)),
        output_ids=TokenIds(40 + (place * 11 + i) % 200 for i in range(OUTPUT)),
        logprobs=Logprobs([-0.25] * OUTPUT),
        versions=(Span(int(spec.created_at) % 900, 0, OUTPUT),),
        finish="stop",
        started_at=spec.created_at + place,
        finished_at=spec.created_at + place + 0.5,
    )


def copy_templates(redis: Redis, sessions: int, began: float) -> None:
    """Copies until there are so many sessions. Each group is a copy of a group."""
    templates = TASKS * GROUP
    for first in range(templates):
        old = [session_name(first), group_name(first)]
        fixed = [*(each.replace("-", "%-") for each in old), key_names.session(""), key_names.group("")]
        for start in range(first + templates, sessions, templates * COPIES_AT_ONCE):
            arguments: list[str | bytes | float] = [*fixed]
            for number in range(start, min(sessions, start + templates * COPIES_AT_ONCE), templates):
                arguments += [session_name(number), group_name(number), began + number]
                arguments.append(encode(spec_of(number, began)))
            named = [key_names.session(old[0]), key_names.SESSIONS, key_names.SETTLED]
            COPY.run_now(redis, named, arguments)


def note_trained(redis: Redis, sessions: int) -> None:
    """What the trainer notes with its verdicts: which step's version each trained session is in."""
    for start in range(0, sessions, 1000):
        found = filter(trained, range(start, min(sessions, start + 1000)))
        redis.zadd(key_names.TRAINED, {session_name(number): version_of(number) for number in found})


async def _write(url: str, began: float) -> None:
    async with AsyncRedis.from_url(url) as redis:
        await write_templates(redis, began)
