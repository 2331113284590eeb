"""The session of a judge at the gateway is ended beside the call, which has a time limit of its own."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from reward_service.judging import GatewayModel, JudgeCall, JudgeSettings
from tests.support.waiting import wait_until_async

CALL = JudgeCall("policy", [{"role": "user", "content": "?"}], {}, {})


class BusyGateway:
    """Opens sessions; answers and ends them when a test lets it."""

    def __init__(self) -> None:
        self.asked, self.answers = asyncio.Event(), asyncio.Event()
        self.ending, self.ends = asyncio.Event(), asyncio.Event()
        self.ended: list[str] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/chat/completions"):
            self.asked.set()
            await self.answers.wait()
            return httpx.Response(200, json={"choices": [{"message": {"content": "0.5"}}]})
        if request.url.path.endswith("/finish"):
            self.ending.set()
            await self.ends.wait()
            self.ended.append(request.url.path.split("/")[2])
        return httpx.Response(200, json={})


@pytest.fixture
async def gateway() -> BusyGateway:
    return BusyGateway()


@pytest.fixture
async def judge(gateway: BusyGateway) -> AsyncIterator[GatewayModel]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(gateway), base_url="http://g") as client:
        yield GatewayModel(JudgeSettings(), client)


async def test_a_call_that_is_out_of_time_does_not_wait_for_the_end_of_its_session(
    gateway: BusyGateway, judge: GatewayModel
) -> None:
    call = asyncio.create_task(judge.ask(CALL))
    await gateway.asked.wait()
    call.cancel()
    await gateway.ending.wait()
    await wait_until_async(call.done)
    gateway.ends.set()
    await judge.close()
    assert len(gateway.ended) == 1


async def test_an_answer_does_not_wait_for_the_end_of_its_session(
    gateway: BusyGateway, judge: GatewayModel
) -> None:
    gateway.answers.set()
    call = asyncio.create_task(judge.ask(CALL))
    await gateway.ending.wait()
    await wait_until_async(call.done)
    assert call.result().text == "0.5"
    gateway.ends.set()
    await judge.close()
    assert len(gateway.ended) == 1
