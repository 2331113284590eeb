"""What the gateway says of the policy: it is asked again while it is away, and not when it refuses."""

import httpx
import pytest

from fine_tuning.training.versions import GatewayRefused, GatewaySilent, PolicyWatch, answered


class Replies:
    """A gateway that answers with one status after the other, and then that it serves no model."""

    def __init__(self, *statuses: int) -> None:
        self.left, self.asked, self.told = list(statuses), 0, list[str]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        status = self.left.pop(0) if self.left else 200
        return httpx.Response(status, json={"data": [{"id": "policy"}]})

    async def model_name(self, waits_s: float) -> str:
        async with httpx.AsyncClient(
            base_url="http://gateway", transport=httpx.MockTransport(self)
        ) as client:
            return await answered(PolicyWatch(client).model_name, waits_s, self.told.append)


async def test_a_gateway_that_is_away_for_a_moment_is_asked_again() -> None:
    replies = Replies(503, 502, 429)
    assert await replies.model_name(60.0) == "policy"
    assert (replies.asked, len(replies.told)) == (4, 1)


async def test_a_gateway_that_refuses_is_not_asked_again() -> None:
    replies = Replies(401, 401)
    with pytest.raises(GatewayRefused, match="HTTP 401"):
        await replies.model_name(60.0)
    assert (replies.asked, replies.told) == (1, [])


async def test_waiting_has_an_end() -> None:
    replies = Replies(*[503] * 1000)
    with pytest.raises(GatewaySilent, match="HTTP 503"):
        await replies.model_name(0.0)
