"""A task that is cancelled ends, whatever it does with the cancellation."""

import asyncio

import pytest

from gateway.engines.cancellation import cancel_and_wait


async def test_a_task_that_swallows_its_first_cancellation_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.engines.cancellation.CANCEL_AGAIN_S", 0.01)
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
