"""Large bodies leave the loop to others: they are worked on one by one, and their owners take turns."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from starlette.types import Message

from rollout_queue.http.json_routes import (
    AT_ONCE_BYTES,
    UNPACED_BYTES,
    PacedReceive,
    next_iteration,
    takes_long,
    worked,
)

LARGE = b"x" * (AT_ONCE_BYTES + 1)
PIECE = 64 * 2**10


class Gate:
    """Work that lasts until the test ends it, and says how much of it goes on."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.at_once = self.most_at_once = 0
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self, name: str) -> str:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.order.append(name)
        self.begun.set()
        assert self.open.wait(60)
        self.at_once -= 1
        return name


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


async def test_work_on_small_bodies_is_done_at_once() -> None:
    here = threading.get_ident()
    assert await worked("a", LARGE[:-1], threading.get_ident) == here
    assert await worked("a", LARGE, threading.get_ident) != here
    with pytest.raises(ZeroDivisionError):
        await worked("a", LARGE, divmod, 1, 0)


async def test_work_on_a_small_body_that_takes_long_is_done_in_a_thread() -> None:
    """It begins again there. Outside of such work, nothing happens."""
    began: list[int] = []

    def work() -> int:
        began.append(threading.get_ident())
        takes_long()
        return len(began)

    assert await worked("a", b"", work) == 2
    assert began[0] == threading.get_ident() != began[1]
    assert work() == 3


@pytest.mark.parametrize("leave", [False, True], ids=["all stay", "the first ones leave"])
async def test_one_large_body_is_worked_on_at_a_time_and_owners_take_turns(gate: Gate, leave: bool) -> None:
    """Also if clients leave while a thread works for them."""
    names = [*(f"a{number}" for number in range(20)), "b"]
    calls = [asyncio.create_task(worked(name[0], LARGE, gate, name)) for name in names]
    await asyncio.to_thread(gate.begun.wait, 60)
    if leave:
        for call in calls[:3]:
            call.cancel()
        await asyncio.wait(calls[:3])
    gate.open.set()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [each for each in found if isinstance(each, str)] == (names[3:] if leave else names)
    assert gate.most_at_once == 1
    assert gate.order.index("b") <= 2


async def test_each_iteration_of_the_loop_is_one_callers_and_owners_take_turns() -> None:
    order: list[str] = []

    async def request(name: str) -> None:
        await next_iteration(name[0])
        order.append(name)

    names = [*(f"a{number}" for number in range(40)), "b"]
    requests = [asyncio.create_task(request(name)) for name in names]
    most = before = 0
    while not all(each.done() for each in requests):
        await asyncio.sleep(0)  # one iteration of the loop
        most, before = max(most, len(order) - before), len(order)
    assert most == 1
    assert order.index("b") <= 2


class Source:
    """A request whose client sends faster than it is read."""

    def __init__(self, received: list[str], name: str) -> None:
        self._received, self._name = received, name

    async def __call__(self) -> Message:
        self._received.append(self._name)
        return {"type": "http.request", "body": b"x" * PIECE, "more_body": True}


async def test_a_loops_iteration_receives_one_piece_of_one_large_body() -> None:
    received: list[str] = []

    async def read(name: str) -> None:
        receive = PacedReceive(Source(received, name), lambda: name[0])
        for _ in range(UNPACED_BYTES // PIECE + 9):
            await receive()

    names = [*(f"a{number}" for number in range(80)), "b"]
    readers = [asyncio.create_task(read(name)) for name in names]
    most = before = 0
    while not all(reader.done() for reader in readers):
        await asyncio.sleep(0)  # one iteration of the loop
        most = max(most, len(received) - before if before else 0)
        before = len(received)
    assert most == 1
    last_of_b = len(received) - received[::-1].index("b")
    assert last_of_b < len(names) * (UNPACED_BYTES // PIECE + 1) + 20, "owners take turns"
