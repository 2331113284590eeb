"""The gateway's public door, as a runner uses it: open sessions, reward turns, end sessions, read them.

A request that is refused for load (429, 503), or that gets no answer, is made again: each one can be repeated
without effect, because sessions and rewards carry ids of the runner.
"""

import logging
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import msgspec
from openai import AsyncOpenAI

from environments.errors import GatewayFault, SessionRefused
from environments.programs.patience import patient_client
from rollout_queue import clock
from rollout_queue.foreign_json import read_json

logger = logging.getLogger(__name__)

BUSY = (429, 503)
OF_SESSIONS = (404, 409, 410)
"""The session is unknown, has another state, or was deleted. Other sessions are served."""
TOLD_AFTER = 3
"""After so many refusals of a request a warning says that the run waits."""
REQUEST_S = 60.0
CONNECTIONS = 256
"""How many requests are in flight at once; the others wait."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 15.0
ANSWER_S = 600.0
"""How long one answer of the model may take."""


@dataclass
class Patience:
    """Ends the repetition of requests early, also of those that are under way."""

    until: float = math.inf
    """A time of the monotonic clock."""

    def ends_in(self, seconds: float) -> None:
        self.until = min(self.until, clock.monotonic() + seconds)


class SessionClient:
    """`waits_s` is how long a request is repeated while the gateway refuses it for load or does not
    answer."""

    def __init__(self, url: str, key: str | None, waits_s: float = 300.0) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=CONNECTIONS),
            timeout=aiohttp.ClientTimeout(total=REQUEST_S),
        )
        self._openai = patient_client(
            waits_s, clock.monotonic, ANSWER_S, base_url=f"{url}/v1", api_key=key or "none"
        )
        self._url, self._waits_s = url, waits_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()
        await self._openai.close()

    def model_client(self, session: Mapping[str, Any]) -> AsyncOpenAI:
        """OpenAI's client whose calls belong to this session."""
        return self._openai.with_options(base_url=session["base_url"], api_key=session["api_key"])

    async def open_session(
        self, session_id: str, description: Mapping[str, Any], patience: Patience | None = None
    ) -> dict[str, Any]:
        """Open a session, or get the same one again."""
        body = {"session_id": session_id, **description}
        session: dict[str, Any] = await self._request("POST", "/sessions", body, patience=patience)
        return session

    async def reward(
        self,
        session_id: str,
        key: str,
        value: float,
        turn_id: str | None,
        source: str,
        patience: Patience | None = None,
    ) -> None:
        body = {"value": value, "key": key, "turn_id": turn_id, "source": source}
        await self._request("POST", f"/sessions/{session_id}/reward", body, patience=patience)

    async def finish(
        self,
        session_id: str,
        status: str,
        reward: float | None,
        reason: str | None,
        patience: Patience | None = None,
    ) -> None:
        body = {"status": status, "reward": reward, "reason": reason and reason[:500]}
        await self._request("POST", f"/sessions/{session_id}/finish", body, patience=patience)

    async def session(self, session_id: str) -> dict[str, Any] | None:
        """The session as the gateway knows it; None if there is none, or no longer."""
        found: dict[str, Any] | None = await self._request(
            "GET", f"/sessions/{session_id}", absent=(404, 410)
        )
        return found

    async def newest_version(self, session_id: str) -> int | None:
        """The newest policy version that sampled a token of the session."""
        session = await self.session(session_id)
        turns = session["turns"] if session else ()
        return max((span["version"] for turn in turns for span in turn["versions"]), default=None)

    async def model_name(self) -> str:
        return str((await self._model())["id"])

    async def served_version(self) -> int | None:
        """The version that answers calls of the policy now; None if the gateway does not say it."""
        found: int | None = (await self._model()).get("version")
        return found

    async def check_model(self, name: str) -> None:
        """Raises GatewayFault if no server answers calls of this model or version."""
        base, served = re.split("[@:]", name, maxsplit=1)[0], await self.model_name()
        if base not in (name, served):  # to agents the gateway says of any name that it is the policy
            raise GatewayFault(f"there are no versions of {base!r}: the gateway serves {served!r}")
        try:
            await self._request("GET", f"/v1/models/{quote(name, safe='@:/')}")
        except SessionRefused as error:
            raise GatewayFault(f"{name!r} answers no calls: {error}") from None

    async def notice(self) -> str | None:
        """What whoever trains the model should know: that the training is paused, or went back. None if there
        is nothing, or if the gateway does not answer at once."""
        try:
            found: str | None = (await self._model(Patience(clock.monotonic()))).get("notice")
        except (GatewayFault, LookupError):
            return None
        return found

    async def _model(self, patience: Patience | None = None) -> dict[str, Any]:
        listed = await self._request("GET", "/v1/models", patience=patience)
        model: dict[str, Any] = listed["data"][0]
        return model

    async def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        absent: tuple[int, ...] = (),
        patience: Patience | None = None,
    ) -> Any:
        """The answer's JSON. Raises SessionRefused and GatewayFault with the gateway's sentence."""
        deadline = clock.monotonic() + self._waits_s
        for attempt in range(1_000_000):
            try:
                async with self._http.request(method, self._url + path, json=body) as reply:
                    status, content, wished_s = reply.status, await reply.read(), _wished_s(reply)
            except (aiohttp.ClientError, TimeoutError) as error:
                why, wished_s = f"{type(error).__name__}: {error}", 0.0
            else:
                if status < 300:
                    return _answer_of(content, f"{method} {path}")
                if status in absent:
                    return None
                why = _sentence(content)
                if status not in BUSY and status < 500:
                    refused = SessionRefused if status in OF_SESSIONS else GatewayFault
                    raise refused(f"{method} {path}: {status}: {why}")
            pause_s = pause_after(attempt, wished_s)
            if clock.monotonic() + pause_s > min(deadline, patience.until if patience else deadline):
                raise GatewayFault(
                    f"the gateway at {self._url} did not serve {method} {path}: {why}; is it there "
                    "(`weir status`)?"
                )
            level = logging.WARNING if attempt == TOLD_AFTER else logging.INFO
            logger.log(
                level, "the gateway at %s is waited for, at most %g s: %s", self._url, self._waits_s, why
            )
            # until the gateway may serve it again
            await clock.sleep(pause_s)
        raise AssertionError


def pause_after(attempt: int, wished_s: float = 0.0) -> float:
    """Seconds before the next attempt: what the gateway wishes, and up to a quarter more, so that runners
    do not come back at once. Without a wish, it is doubled each time, and a random half of it is taken."""
    if wished_s:
        return wished_s * random.uniform(1.0, 1.25)
    return clock.backoff_s(attempt, FIRST_PAUSE_S, LONGEST_PAUSE_S)


def _wished_s(reply: aiohttp.ClientResponse) -> float:
    try:
        return min(LONGEST_PAUSE_S, max(0.0, float(reply.headers.get("retry-after", 0))))
    except ValueError:
        return 0.0


def _answer_of(content: bytes, call: str) -> Any:
    try:
        return read_json(content)
    except msgspec.DecodeError as error:
        raise GatewayFault(f"{call}: the answer is no JSON: {error}") from error


def _sentence(content: bytes) -> str:
    try:
        return str(read_json(content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
