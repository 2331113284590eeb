"""A retry at one worker of a gateway, whose call another worker serves."""

import asyncio
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.callers.identity import Caller
from gateway.counters import CallFigures
from gateway.edge.calls import CallKey
from gateway.edge.joins import HAVE_PATH, Joins
from gateway.edge.reply import Reply
from rollout_queue import clock
from rollout_queue.http.worker_processes import ASK_S, SILENT_S, Siblings, Worker, private_server, unix_socket
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until

KEY = CallKey(Caller("client", "client"), "s", (), "digest")


async def test_a_retry_waits_for_a_worker_that_stands_still_and_joins(tmp_path: Path) -> None:
    """The call would be sampled twice. The parent process kills a worker that stands still for longer."""
    asked, goes_on = asyncio.Event(), asyncio.Event()

    async def worker(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        if scope["path"] == HAVE_PATH:
            asked.set()
            await goes_on.wait()
            await Response()(scope, receive, send)
        else:
            await Response(b"the answer")(scope, receive, send)

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    turned = TurnedClock()
    with clock.using(turned):
        async with private_server(Worker(0, 2, tmp_path), worker):
            await asyncio.to_thread(wait_until, unix_socket(tmp_path, 0).exists)
            siblings = Siblings(tmp_path, [0])
            reply = Reply(send, "", CallFigures("chat"))
            answered = asyncio.create_task(Joins(siblings).answered(KEY, 1, reply))
            await asked.wait()
            turned.turn(SILENT_S + ASK_S)
            for _ in range(10):
                await asyncio.sleep(0)  # whatever has come due runs
            goes_on.set()
            assert await answered
            await siblings.close()
    assert b"".join(message.get("body", b"") for message in sent) == b"the answer"
