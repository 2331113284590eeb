"""Time that a test turns: what waits goes on when the clock is turned past its end, and not before."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable

import pytest

from rollout_queue import clock
from tests.support.threads import meanwhile
from tests.support.turned_clock import TurnedClock

HOUR_S = 3600.0


async def test_a_sleep_ends_when_the_clock_is_turned_past_its_end() -> None:
    turned = TurnedClock()
    with clock.using(turned):
        sleeping = asyncio.create_task(clock.sleep(HOUR_S))  # until the clock is turned
    await asyncio.sleep(0)  # the task begins to sleep
    turned.turn(HOUR_S / 2)
    await asyncio.sleep(0.01)  # an early end would show by now
    assert not sleeping.done()
    turned.turn(HOUR_S / 2)
    await sleeping


async def test_a_timeout_comes_when_the_clock_is_turned() -> None:
    turned = TurnedClock()

    async def limited() -> None:
        async with clock.timeout(HOUR_S):
            await asyncio.Event().wait()

    with clock.using(turned):
        waiting = asyncio.create_task(limited())
    await asyncio.sleep(0)  # the task begins to wait
    turned.turn(HOUR_S)
    with pytest.raises(TimeoutError):
        await waiting
    assert not turned.timers


async def test_what_ends_in_time_meets_no_timeout() -> None:
    turned = TurnedClock()
    with clock.using(turned):
        async with clock.timeout(HOUR_S) as limit:
            await asyncio.sleep(0)  # any other work
    turned.turn(2 * HOUR_S)
    assert not limit.expired()
    assert not turned.timers


async def test_a_cancelled_sleep_leaves_no_timer() -> None:
    turned = TurnedClock()
    with clock.using(turned):
        sleeping = asyncio.create_task(clock.sleep(HOUR_S))  # until the clock is turned
    await asyncio.sleep(0)  # the task begins to sleep
    sleeping.cancel()
    await asyncio.wait([sleeping])
    assert not turned.timers


async def test_a_cancelled_timer_never_calls_back() -> None:
    turned, called = TurnedClock(), []
    with clock.using(turned):
        clock.call_later(HOUR_S, lambda: called.append("kept"))
        clock.call_later(HOUR_S, lambda: called.append("cancelled")).cancel()
    turned.turn(HOUR_S)
    await asyncio.sleep(0.01)  # both would have been called by now
    assert called == ["kept"]


async def test_no_time_passes_by_itself_on_a_stopped_clock() -> None:
    turned = TurnedClock(stopped=True)
    with clock.using(turned):
        before = clock.now(), clock.monotonic()
        sleeping = asyncio.create_task(clock.sleep(0.001))  # until the clock is turned
        await asyncio.sleep(0.01)  # on the machine's clock it would have ended
        assert not sleeping.done()
        assert (clock.now(), clock.monotonic()) == before
        turned.turn(0.001)
        await sleeping
        assert clock.monotonic() == before[1] + 0.001


def test_threads_and_readings_follow_the_turned_clock() -> None:
    turned, event, over = TurnedClock(), threading.Event(), threading.Event()

    def turn() -> None:
        while not over.wait(0.01):
            turned.turn(HOUR_S)

    with clock.using(turned):
        before = clock.now(), clock.monotonic()
        with meanwhile(over, turn):
            assert not clock.wait(event, HOUR_S)
        assert clock.now() - before[0] >= HOUR_S
        assert clock.monotonic() - before[1] >= HOUR_S
        event.set()
        assert clock.wait(event, HOUR_S)
    assert abs(clock.now() - time.time()) < HOUR_S


def test_outside_of_the_block_the_machines_clock_is_current() -> None:
    with clock.using(TurnedClock()):
        pass
    assert clock.monotonic() <= time.monotonic()


@pytest.mark.parametrize("before_s", [0.0, 0.1, 0.25])
async def test_time_in_which_the_process_stands_still_counts_in_no_timeout(before_s: float) -> None:
    """What has arrived meanwhile is read first; and what arrives soon after is awaited."""
    reader, told = asyncio.StreamReader(), list[str]()
    here, there = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=here)
    transport = writer.transport
    transport.set_protocol(asyncio.StreamReaderProtocol(reader))
    clock.deadline(0.3, lambda: told.append("deadline"))
    started = time.monotonic()
    async with clock.timeout(0.3):
        await asyncio.sleep(before_s)  # moves the standstill against the timer
        there.send(b"x")
        time.sleep(1.0)  # noqa: ASYNC251 - the whole loop stands still
        assert await reader.read(1) == b"x"
    assert told == []
    with pytest.raises(TimeoutError):
        async with clock.timeout(0.3):
            await reader.read(1)
    assert told == ["deadline"]
    assert time.monotonic() - started > 1.3
    cancelled = clock.deadline(0.0, lambda: told.append("cancelled"))
    cancelled.cancel()
    await asyncio.sleep(0.1)  # it would have been called by now
    assert told == ["deadline"]
    writer.close()
    there.close()


async def test_however_often_deadlines_come_and_go_a_loop_has_one_tick_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, waited = asyncio.get_running_loop(), list[float]()
    call_later = loop.call_later

    def counted(seconds: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        waited.append(seconds)
        return call_later(seconds, callback)

    monkeypatch.setattr(loop, "call_later", counted)
    for _ in range(100):
        clock.deadline(HOUR_S, lambda: None).cancel()
    assert waited.count(clock.TICK_S) == 1
