"""Fake engines that stop in the middle of an answer until the test lets them continue."""

import asyncio
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.running import RunningGateway
from tests.support.waiting import wait_until

ANSWER = [5] * 100
"""More tokens than the engine sends in one event for a call that does not stream."""


class GatedEngine(FakeEngine):
    """Stops at `stall_after` tokens until `open` is set."""

    open = False

    async def _stall(self) -> None:
        self.stalled = True
        while not self.open:  # noqa: ASYNC110 - the test that opens it runs in another thread
            await asyncio.sleep(0.005)  # until the test calls `let_on`


def let_on(gateway: RunningGateway) -> None:
    assert isinstance(gateway.engine, GatedEngine)
    gateway.engine.open = True


def asked(gateway: RunningGateway, times: int) -> None:
    """Wait until the engine has received `times` requests and has stopped in the middle of an answer."""
    wait_until(lambda: len(gateway.engine.requests) == times and gateway.engine.stalled)


class NumberingEngine(GatedEngine):
    """Gives each answer its own number, so that an answer identifies its turn. Each takes several events."""

    numbers: Iterator[int]

    async def generate(self, request: Request) -> Response:
        self.script.append(f"answer {next(self.numbers)}" + ", and so it goes on" * 20)
        return await super().generate(request)
