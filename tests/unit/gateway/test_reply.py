"""An answer reaches the client in order, however slow its socket is; and a cancelled task ends."""

import asyncio
from typing import Any

import pytest

from gateway.cancellation import cancel_and_wait
from gateway.counters import CallFigures
from gateway.edge.reply import Reply


async def test_a_stream_that_ends_while_its_first_heartbeat_waits_begins_all_the_same() -> None:
    sent: list[str] = []
    opening, writable = asyncio.Event(), asyncio.Event()

    async def send(message: Any) -> None:
        opening.set()
        await writable.wait()
        sent.append(message["type"])

    reply = Reply(send, "r", CallFigures("chat"))
    reply.keep_alive(b": hi\n\n", 0.02, dict)
    await opening.wait()  # the heartbeat is opening the stream and waits for the socket
    closing = asyncio.create_task(reply.close(b"data: x\n\n"))
    await asyncio.sleep(0)  # the close begins and waits for the heartbeat
    writable.set()
    await closing
    assert sent[0] == "http.response.start"
    assert set(sent[1:]) == {"http.response.body"}


async def test_a_silent_stream_is_opened_and_kept_alive() -> None:
    sent: list[Any] = []
    beaten = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 4:
            beaten.set()

    reply = Reply(send, "r", CallFigures("chat"))
    reply.keep_alive(b": hi\n\n", 0.02, lambda: {"x-weir-session-id": "s"})
    await beaten.wait()
    await reply.close(b"data: x\n\n")
    count = len(sent)
    await asyncio.sleep(0.06)  # three intervals of heartbeats; no event tells that none comes
    assert len(sent) == count  # nothing after the end
    assert sent[0]["type"] == "http.response.start"
    assert (b"x-weir-session-id", b"s") in sent[0]["headers"]
    assert [message["body"] for message in sent[1:-1]] == [b": hi\n\n"] * (count - 2)


async def test_a_task_that_swallows_its_first_cancellation_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.cancellation.CANCEL_AGAIN_S", 0.01)
    lost: list[BaseException] = []

    async def forgetful() -> None:
        while True:
            try:
                await asyncio.sleep(60)  # until the task is cancelled
            except asyncio.CancelledError as error:
                lost.append(error)
                if len(lost) == 2:
                    raise

    task = asyncio.create_task(forgetful())
    await asyncio.sleep(0)  # the task begins
    await asyncio.wait_for(cancel_and_wait([task]), timeout=300)
    assert (task.cancelled(), len(lost)) == (True, 2)
