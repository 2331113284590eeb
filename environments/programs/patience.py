"""Clients for whoever plays episodes: they make a call again that is refused for load, or lost.

patient_client  OpenAI's: it makes the attempts itself, and here is decided how long it goes on
PatientClient   httpx's, for a library whose client makes no attempts

Attempts are marked with the number that the gateway reads. This module needs only `httpx` and the standard
library, and `patient_client` the library `openai`.
"""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from openai import AsyncOpenAI

FOR_LOAD = (429, 503)
SHOULD_RETRY = "x-should-retry"
"""A header that the client obeys."""
ATTEMPT = "x-stainless-retry-count"
ATTEMPTS = 1_000_000
"""More than a wait can have."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0


@dataclass
class ModelCall:
    """One call: when its first attempt began, and since when it waits to be made again."""

    began_at: float
    waits_since: float | None = None
    refused: bool = False
    """Whether the last attempt got an answer; otherwise it was lost."""


calls: ContextVar[ModelCall | None] = ContextVar("calls", default=None)
"""All attempts of a call are made in one task."""


def patient_client(waits_s: float, now: Callable[[], float], answer_s: float, **given: Any) -> "AsyncOpenAI":
    """A client whose calls are made again for `waits_s` seconds. The time of attempts that are refused for
    load counts, that of an answer that is lost does not. `now` is a monotonic clock."""

    from openai import APIConnectionError, AsyncOpenAI, DefaultAsyncHttpxClient

    async def before_request(request: Any) -> None:
        call = calls.get()
        if call is None or request.headers.get(ATTEMPT, "0") == "0":
            calls.set(ModelCall(now()))
            return
        call.waits_since = now() if call.waits_since is None else call.waits_since
        if not call.refused and now() > call.waits_since + waits_s:
            message = f"{request.url.host}:{request.url.port} gave no answer for {waits_s:.0f} s"
            raise APIConnectionError(message=message, request=request)
        call.refused = False

    async def after_response(response: Any) -> None:
        call, status = calls.get(), response.status_code
        if call is None or status < 400:
            return
        call.refused = True
        if call.waits_since is None:
            call.waits_since = call.began_at if status in FOR_LOAD else now()
        if not passes(status) or now() + wished_s(response) > call.waits_since + waits_s:
            response.headers[SHOULD_RETRY] = "false"

    http = DefaultAsyncHttpxClient(event_hooks={"request": [before_request], "response": [after_response]})
    return AsyncOpenAI(http_client=http, max_retries=ATTEMPTS, timeout=answer_s, **given)


class PatientClient(httpx.AsyncClient):
    """Waits as `patient_client` does."""

    def __init__(
        self,
        waits_s: float,
        now: Callable[[], float],
        pause: Callable[[float], Awaitable[object]],
        **given: Any,
    ) -> None:
        super().__init__(**given)
        self._waits_s, self._now, self._pause = waits_s, now, pause

    async def send(self, request: httpx.Request, **given: Any) -> httpx.Response:
        until, pause_s = None, FIRST_PAUSE_S
        while True:
            began, response = self._now(), None
            try:
                response = await super().send(request, **given)
                if not _again(response):
                    return response
                ended = began if response.status_code in FOR_LOAD else self._now()
            except httpx.TransportError:
                ended = self._now()
                if until is not None and ended + pause_s > until:
                    raise
            until = until or ended + self._waits_s
            wait_s = max(pause_s, 0.0 if response is None else wished_s(response))
            if response is not None:
                if self._now() + wait_s > until:
                    return response
                await response.aclose()
            await self._pause(wait_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            request.headers[ATTEMPT] = str(int(request.headers.get(ATTEMPT, "0")) + 1)


def _again(response: httpx.Response) -> bool:
    return passes(response.status_code) and response.headers.get(SHOULD_RETRY) != "false"


def wished_s(response: Any) -> float:
    """After how many seconds the gateway wishes another attempt."""
    try:
        return max(0.0, float(response.headers.get("retry-after", 0)))
    except ValueError:
        return 0.0


def passes(status: int) -> bool:
    """Whether another attempt may succeed: the request is not the cause."""
    return status in (408, 429) or status >= 500
