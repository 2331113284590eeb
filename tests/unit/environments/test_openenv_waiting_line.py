"""Episodes that wait while a server is full."""

import asyncio

import pytest

from environments.errors import EnvironmentFault
from environments.openenv.connection import ServerIsFull
from environments.openenv.waiting_line import WaitingLine


async def test_who_came_first_gets_the_next_place() -> None:
    line, places, entered = WaitingLine(waits_s=60.0), 0, []

    async def enter(number: int) -> None:
        async def attempt() -> None:
            nonlocal places
            if not places:
                raise ServerIsFull
            places -= 1
            entered.append(number)

        await line.enter(attempt)

    waiting = []
    for number in range(3):
        waiting.append(asyncio.create_task(enter(number)))
        await asyncio.sleep(0)  # it takes its place in the line
    places = 3
    line.freed()
    late = asyncio.create_task(enter(3))
    await asyncio.sleep(0)  # it comes last
    places = 4
    await asyncio.gather(*waiting, late)
    assert entered == [0, 1, 2, 3]


async def test_who_came_first_is_first_although_nobody_tells_of_room() -> None:
    line, entered, full = WaitingLine(waits_s=60.0), list[int](), True

    async def enter(number: int) -> None:
        async def attempt() -> None:
            if full:
                raise ServerIsFull
            entered.append(number)

        await line.enter(attempt)

    waiting = []
    for number in range(4):
        waiting.append(asyncio.create_task(enter(number)))
        await asyncio.sleep(0)  # it takes its place in the line
    full = False
    await asyncio.gather(*waiting)
    assert entered == [0, 1, 2, 3]


async def test_a_server_that_lets_nobody_in_is_a_fault() -> None:
    async def attempt() -> None:
        raise ServerIsFull("2/2 sessions active")

    with pytest.raises(EnvironmentFault, match="let nobody in for 0 s: 2/2 sessions active"):
        await WaitingLine(waits_s=0.01).enter(attempt)


async def test_an_attempt_that_fails_otherwise_leaves_the_line() -> None:
    line = WaitingLine(waits_s=60.0)
    said = iter([ServerIsFull(), EnvironmentFault("gone")])

    async def attempt() -> None:
        raise next(said)

    with pytest.raises(EnvironmentFault, match="gone"):
        await line.enter(attempt)


async def test_a_cancelled_episode_leaves_the_line() -> None:
    line = WaitingLine(waits_s=60.0)
    tried = asyncio.Event()

    async def refused() -> None:
        tried.set()
        raise ServerIsFull

    async def let_in() -> str:
        return "in"

    waiting = asyncio.create_task(line.enter(refused))
    await tried.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await line.enter(let_in) == "in"
