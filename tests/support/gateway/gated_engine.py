"""Fake engines that a test holds up in the middle of an answer, and lets go on."""

import asyncio
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.running import RunningGateway
from tests.support.waiting import wait_until

ANSWER = [5] * 100
"""More tokens than one event brings to a client that does not stream."""


class GatedEngine(FakeEngine):
    """Stops where it stalls until it is let on."""

    open = False

    async def _stall(self) -> None:
        self.stalled = True
        while not self.open:  # noqa: ASYNC110 - the test that opens it runs in another thread
            await asyncio.sleep(0.005)  # until it is let on


def let_on(gateway: RunningGateway) -> None:
    assert isinstance(gateway.engine, GatedEngine)
    gateway.engine.open = True


def asked(gateway: RunningGateway, times: int) -> None:
    """The engine was asked so often, and is in the middle of its answers."""
    wait_until(lambda: len(gateway.engine.requests) == times and gateway.engine.stalled)


class NumberingEngine(GatedEngine):
    """Never says the same twice, so that every answer names its turn; and always more than one event."""

    numbers: Iterator[int]

    async def generate(self, request: Request) -> Response:
        self.script.append(f"answer {next(self.numbers)}" + ", and so it goes on" * 20)
        return await super().generate(request)
