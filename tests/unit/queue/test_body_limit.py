"""All bodies of a service together are bounded, those that arrive slowly and those of requests in work."""

import asyncio
import gzip
from typing import Any

import pytest

from rollout_queue.http.body_limit import AT_ONCE, BodyLimit

MOST = 1000


class Calls:
    """Requests to an application that works until it is told to end."""

    def __init__(self) -> None:
        self.begun, self.ends = asyncio.Semaphore(0), asyncio.Event()
        self.limit = BodyLimit(self._work, MOST)

    async def _work(self, _: Any, receive: Any, send: Any) -> None:
        await receive()
        self.begun.release()
        await self.ends.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    def begin(self, *pieces: bytes, leaves: bool = False, coding: str = "") -> asyncio.Task[int]:
        """A request whose body has these pieces. The client is then silent, or leaves."""
        return asyncio.create_task(self._status([*pieces], leaves, coding))

    async def _status(self, pieces: list[bytes], leaves: bool, coding: str) -> int:
        """0 for a request without an answer."""
        status = 0
        headers = [(b"content-encoding", coding.encode())] if coding else []

        async def receive() -> Any:
            if pieces:
                more = bool(len(pieces) > 1) or leaves
                return {"type": "http.request", "body": pieces.pop(0), "more_body": more}
            if not leaves:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        await self.limit({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive, send)
        return status


@pytest.mark.parametrize("leaves", [False, True], ids=["answered", "left"])
async def test_bodies_beyond_the_bound_of_all_are_refused_until_others_end(leaves: bool) -> None:
    calls = Calls()
    begun = [calls.begin(bytes(MOST // 2), bytes(MOST // 2), leaves=leaves) for _ in range(AT_ONCE)]
    for _ in begun:
        await calls.begun.acquire()
    assert await calls.begin(b"x") == 429
    calls.ends.set()
    assert [await each for each in begun] == [200] * AT_ONCE
    assert await calls.begin(bytes(MOST)) == 200
    assert await calls.begin(bytes(MOST + 1)) == 413


async def test_a_body_counts_as_what_it_becomes() -> None:
    calls = Calls()
    packed = gzip.compress(bytes(MOST))
    begun = [calls.begin(packed, coding="gzip") for _ in range(AT_ONCE)]
    statuses = asyncio.gather(*begun)
    await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
    calls.ends.set()
    found = await statuses
    assert found.count(429) >= 1, "each needs its own bytes and those that they become"
    assert set(found) == {200, 429}
    assert await calls.begin(packed, coding="gzip") == 200
