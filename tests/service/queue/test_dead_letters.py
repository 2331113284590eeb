"""Records that a trainer could not read go back into the stream once a build can read them, each once."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner

from rollout_queue.contract.codec import encode
from rollout_queue.contract.errors import UnknownSchema
from rollout_queue.contract.records import Verdict
from rollout_queue.redis import key_names
from rollout_queue.redis.record_restore import MOVE, requeue
from tests.support.queue.ends import Ends
from tests.support.queue.records import turn
from tests.support.redis_clients import redis_at
from weir.__main__ import app


class Killed(BaseException):
    """Ends a run between two commands."""


@pytest.fixture
def other(redis_url: str) -> Iterator[Redis]:
    with redis_at(redis_url) as client:
        yield client


def set_aside(stream: Ends) -> list[bytes]:
    """A trainer that is too old reads everything. Returns the records, in their order."""

    def too_old(_: bytes) -> Any:
        raise UnknownSchema("record schema 2; this build reads schema 1")

    before = stream.records()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout_queue.redis.stream_reader.decode", too_old)
        assert stream.read() == []
    stream.redis.xtrim(key_names.STREAM, 0)
    assert stream.records(key_names.DEAD_LETTERS) == before
    return before


async def test_what_can_be_read_goes_back_in_its_order_and_once_however_often_a_run_is_killed(
    stream: Ends, other: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("s1", "s2", "s3"):
        await stream.episode(name, turns=2)
    await stream.deleted("s2")
    before = [each for each in set_aside(stream) if each]
    run = other.evalsha
    for killed_at in count(1):
        left = [killed_at]

        def killing(*given: Any, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            reply = run(*given)
            if left[0] == 1:  # the script has run, and its answer is lost with the process
                raise Killed
            return reply

        monkeypatch.setattr(other, "evalsha", killing)
        with suppress(Killed):
            list(requeue(other))
        if not stream.redis.xlen(key_names.DEAD_LETTERS):
            break
    monkeypatch.undo()
    assert killed_at > 2
    assert list(requeue(other)) == []
    assert stream.records() == before
    assert [encode(each) for each in stream.read()] == before


async def test_what_cannot_be_trained_any_more_stays_until_it_is_discarded(
    stream: Ends, other: Redis
) -> None:
    """A session that its client has ended as failed still counts in its group, so its records go back."""
    for name in ("waits", "decided", "failed", "gone"):
        await stream.episode(name)
    set_aside(stream)
    stream.reader.acknowledge([], verdicts := _verdicts(decided="stale", failed="failed"))
    assert verdicts
    stream.redis.delete(key_names.session("gone"))
    stream.redis.xadd(key_names.DEAD_LETTERS, {b"r": b"\x63later"})
    stream.redis.xadd(key_names.DEAD_LETTERS, {b"x": b"of another program"})

    def fates(**how: bool) -> dict[str, int]:
        found: dict[str, int] = {}
        for letter in requeue(other, **how):
            found[letter.fate] = found.get(letter.fate, 0) + 1
        return found

    expected = {"requeued": 6, "decided": 3, "gone": 3, "unreadable": 2}
    assert fates(dry_run=True) == fates(dry_run=True, discard=True) == expected
    assert (stream.redis.xlen(key_names.STREAM), stream.redis.xlen(key_names.DEAD_LETTERS)) == (0, 14)
    assert fates() == expected
    assert stream.redis.xlen(key_names.STREAM) == 6
    assert fates(discard=True) == {"decided": 3, "gone": 3, "unreadable": 2}
    assert fates(discard=True) == {"unreadable": 2}
    assert stream.redis.xlen(key_names.STREAM) == 6


def _verdicts(**codes: Any) -> Any:
    from rollout_queue.contract.stream import Verdicts

    return Verdicts({name: Verdict(code=code) for name, code in codes.items()}, {})


async def test_a_session_that_is_deleted_meanwhile_does_not_come_back(
    stream: Ends, other: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stream.episode("s1")
    set_aside(stream)
    assert [each.fate for each in requeue(other, dry_run=True)] == ["requeued"] * 3
    letter: bytes = stream.redis.xrange(key_names.DEAD_LETTERS)[0][0]  # type: ignore[index,assignment]
    await stream.deleted("s1")
    named = [key_names.DEAD_LETTERS, key_names.STREAM, key_names.session("s1")]
    assert not MOVE.run_now(other, named, [letter, encode(turn())])
    assert len(stream.records()) == 1, "the deletion alone"


async def test_the_command_says_what_it_did_and_what_stays(stream: Ends, redis_url: str) -> None:
    await stream.episode("s1")
    set_aside(stream)
    stream.redis.xadd(key_names.DEAD_LETTERS, {b"r": b"\x07later"})
    command = ["requeue", "--redis-url", redis_url]
    said = CliRunner().invoke(app, [*command, "--dry-run"])
    assert "3 records would be put back into the stream" in said.output
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 1
    assert "3 records were put back into the stream" in said.output
    assert "1 cannot be read by this build either, and are kept; the last: record schema 7" in said.output
    assert len(stream.records()) == 3
