"""Which turn of a session a retry replaces. The stream and the heads of its sessions agree about it."""

import asyncio
from itertools import permutations
from typing import Any

import pytest

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.outcomes import orphans_of
from rollout_queue.contract.records import Turn
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.queue.ends import Ends
from tests.support.queue.records import spec, turn
from tests.support.redis_clients import async_redis_at


def attempt(turn_id: str, attempt: int, started_at: float, **fields: Any) -> Turn:
    """A turn for one attempt; all attempts have the same request."""
    return turn(turn_id, attempt=attempt, started_at=started_at, request_digest="q", **fields)


FIRST, AGAIN = attempt("first", 0, 100.0), attempt("again", 1, 110.0)
LATER = attempt("later", 0, 120.0)
SAMPLES = [attempt(f"t{index}", 0, 100.0 + index) for index in range(3)]


async def recorded(ends: Ends, *turns: Turn) -> SessionHead:
    """The head of a session with these turns in this order. Checks that stream and head agree."""
    await ends.writer.open_session(spec())
    appended = [await ends.writer.append_turn(each, 200.0) for each in turns]
    head = await ends.head()
    assert ends.read() == appended
    assert orphans_of(appended) == head.orphans
    return head


@pytest.mark.parametrize(
    ("turns", "orphans"),
    [
        ([turn("other", request_digest="other"), FIRST, AGAIN], {"first": "again"}),
        ([AGAIN, FIRST], {"first": "again"}),
        (SAMPLES, {}),
        ([*SAMPLES, attempt("r0", 1, 110.0), attempt("r1", 1, 111.0)], {"t2": "r0", "t1": "r1"}),
        ([attempt("r0", 1, 110.0), attempt("r1", 1, 111.0)], {}),
        ([AGAIN, LATER], {}),
        ([LATER, AGAIN], {}),
        (
            [attempt("aborted", 0, 100.0, finish="abort"), attempt("answered", 0, 101.0), AGAIN],
            {"aborted": "again"},
        ),
    ],
    ids=[
        "the same request",
        "recorded after its retry",
        "samples that nobody marked",
        "each retry replaces one sample",
        "retries of calls without answer",
        "a call that began after a retry",
        "a call that began after a retry and ended before it",
        "an aborted turn before others",
    ],
)
async def test_a_retry_replaces_one_turn_of_its_request_that_began_before_it(
    ends: Ends, turns: list[Turn], orphans: dict[str, str]
) -> None:
    head = await recorded(ends, *turns)
    assert head.orphans == orphans
    assert all(head.relation_of(head.by_id[retry]) == "retry" for retry in orphans.values())


async def test_a_turn_that_was_continued_is_no_orphan(ends: Ends) -> None:
    head = await recorded(ends, FIRST, turn("child", parent_id="first", relation="extends"), AGAIN)
    assert head.orphans == {}
    assert head.relation_of(head.by_id["again"]) == "retry"


@pytest.mark.parametrize("order", list(permutations(("first", "second", "third"))))
async def test_of_three_attempts_the_last_one_stays_whichever_is_recorded_first(
    ends: Ends, order: tuple[str, ...]
) -> None:
    attempts = {"first": FIRST, "second": attempt("second", 1, 110.0), "third": attempt("third", 2, 120.0)}
    head = await recorded(ends, *(attempts[name] for name in order))
    assert set(head.orphans) == {"first", "second"}


async def test_a_retry_that_is_appended_again_is_as_it_was(ends: Ends) -> None:
    head = await recorded(ends, FIRST, AGAIN)
    assert head.by_id["again"].retry_of == "first"
    assert await ends.writer.append_turn(AGAIN, 200.0) == head.by_id["again"]
    assert ends.read() == []


async def test_of_attempts_that_are_appended_at_once_one_stays(stream: Ends, redis_url: str) -> None:
    clients = [async_redis_at(redis_url) for _ in range(6)]
    writers = [StreamWriter(client) for client in clients]
    for round_ in range(20):
        name = f"s{round_}"
        await writers[0].open_session(spec(name))
        attempts = [attempt(f"t{each}", each, 100.0 + each, session_id=name) for each in range(6)]
        shifted = attempts[round_ % 6 :] + attempts[: round_ % 6]
        await asyncio.gather(
            *(writer.append_turn(each, 200.0) for writer, each in zip(writers, shifted, strict=True))
        )
        head = await stream.head(name)
        assert set(head.by_id) - set(head.orphans) == {"t5"}
    for writer, client in zip(writers, clients, strict=True):
        await writer.close()
        await client.aclose()
