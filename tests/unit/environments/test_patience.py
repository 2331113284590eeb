"""A library whose client makes no attempts waits for the gateway as the runner does."""

import asyncio
from collections.abc import Sequence

import httpx
import pytest

from environments.programs.patience import ATTEMPT, PatientClient

Said = int | tuple[int, dict[str, str]]
"""A status, maybe with headers; 0 is a connection that is refused."""


class Gateway:
    """Says these things one after the other, and then the last one for ever."""

    def __init__(self, *said: Said) -> None:
        self._said = list(said)
        self.attempts: list[str | None] = []
        self.now = 0.0

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.attempts.append(request.headers.get(ATTEMPT))
        said = self._said.pop(0) if len(self._said) > 1 else self._said[0]
        status, headers = said if isinstance(said, tuple) else (said, {})
        if not status:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(status, headers=headers, content=request.content)

    async def pause(self, seconds: float) -> None:
        self.now += seconds

    def asked(self, waits_s: float = 100, headers: dict[str, str] | None = None) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.MockTransport(self.handle)
            async with PatientClient(waits_s, lambda: self.now, self.pause, transport=transport) as client:
                return await client.post("http://gateway/v1/chat/completions", json={"a": 1}, headers=headers)

        return asyncio.run(ask())


@pytest.mark.parametrize("refusals", [[503, 429, 0, 502], [(429, {"retry-after": "40"}), 0]])
def test_a_call_is_made_again_with_the_number_of_its_attempt(refusals: Sequence[Said]) -> None:
    gateway = Gateway(*refusals, 200)
    reply = gateway.asked()
    assert (reply.status_code, reply.json()) == (200, {"a": 1})
    assert gateway.attempts == [None, *(str(number) for number in range(1, len(refusals) + 1))]
    assert gateway.now >= (40 if len(refusals) == 2 else 0.5)


def test_an_attempt_of_a_harness_is_not_taken_for_the_first_one() -> None:
    gateway = Gateway(503, 200)
    gateway.asked(headers={ATTEMPT: "2"})
    assert gateway.attempts == ["2", "3"]


def test_the_wait_ends_with_what_was_said_last() -> None:
    for said in (503, 0):
        gateway = Gateway(said)
        try:
            assert gateway.asked(waits_s=60).status_code == said
        except httpx.ConnectError:
            assert said == 0
        assert 50 < gateway.now <= 60
    far = Gateway((503, {"retry-after": "61"}))
    assert (far.asked(waits_s=60).status_code, far.now) == (503, 0)


@pytest.mark.parametrize("said", [200, 400, 401, 404, (429, {"x-should-retry": "false"})])
def test_what_another_attempt_would_not_change_is_passed_on(said: Said) -> None:
    gateway = Gateway(said)
    gateway.asked()
    assert gateway.attempts == [None]
