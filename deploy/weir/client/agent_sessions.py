"""Sessions as blocks: opened at the beginning, and ended at the end by what happened in between.

the block ends                       the session
  without an error                   completed; without a reward it waits for one
  because the context is full        truncated
  with another error                 failed: it trains nothing
  cancelled, or interrupted          abandoned

Each request may be made again without effect. Code without an event loop has it made in a background thread.
"""

import asyncio
import functools
import importlib
import inspect
import json
import os
import random
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

import httpx

from weir.shared import (
    CONTEXT_IS_FULL,
    GatewayFault,
    PatientClient,
    SessionRefused,
    clock,
    fills_context,
    id_of,
)

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI

EndStatus = Literal["completed", "truncated", "failed", "abandoned"]
Reward = float | None
Verdict = dict[str, Any]
Opened = TypeVar("Opened")
STOPS_WITHIN_S = 10.0
"""How long a program that is stopped goes on to end its sessions. They expire without it, too."""
Result = TypeVar("Result")
Given = ParamSpec("Given")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
FIRST_CONTACT_S = 5.0
"""How long a gateway is waited for that has never answered this process: its address may be wrong."""
_answered = set[str]()
GivenGateway: TypeAlias = "GatewayAddress | str | None"
MODEL_CALL_RETRIES = 8
"""How often official clients make a call again: for 40 s, in which a gateway that died has started again."""


@dataclass(frozen=True)
class GatewayAddress:
    url: str
    key: str | None = field(default=None, repr=False)
    wait_s: float = 300.0
    """How long a request is made again while the gateway refuses it for load or does not answer."""


def find_gateway(given: GivenGateway = None) -> GatewayAddress:
    """The gateway that is given, else that of WEIR_GATEWAY_URL, else that of `weir up`; with the client key
    of WEIR_CLIENT_KEYS, else that of `weir up`, which no other gateway gets. Raises GatewayFault."""
    if isinstance(given, GatewayAddress):
        return given
    run_dir = Path(os.environ.get("WEIR_STACK__RUN_DIR") or "run")
    state = json.loads(_text_or_nothing(run_dir / "stack.json") or "{}")
    own = state.get("services", {}).get("gateway", {}).get("url")
    url = given or os.environ.get("WEIR_GATEWAY_URL") or own
    if url is None:
        where = "start one with `weir up`, or say where it is (WEIR_STACK__RUN_DIR=DIR/run, WEIR_GATEWAY_URL)"
        raise GatewayFault(f"no gateway is known, and none was started in {run_dir.absolute()}: {where}")
    if not url.startswith(("http://", "https://")):
        raise GatewayFault(f"{url!r} is no address of a gateway: give http://HOST:PORT")
    keys = os.environ.get("WEIR_CLIENT_KEYS") or _text_or_nothing(os.environ.get("WEIR_CLIENT_KEYS_FILE"))
    parts = urlsplit(url)
    if not keys and own and (parts.port, parts.hostname in LOOPBACK) == (urlsplit(own).port, True):
        keys = _text_or_nothing(run_dir / "keys" / "client_keys")
    return GatewayAddress(url.rstrip("/"), next(iter(keys.replace(",", " ").split()), None))


def _text_or_nothing(path: Path | str | None) -> str:
    return Path(path).read_text(encoding="utf-8") if path and Path(path).exists() else ""


class GatewayRequests:
    """Belongs to the event loop in which it is made. The official clients that it makes share connections."""

    def __init__(self, given: GivenGateway) -> None:
        self._address = find_gateway(given)
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._official: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._http = PatientClient(
            self._address.wait_s,
            clock.monotonic,
            lambda pause_s: clock.sleep(pause_s * random.uniform(1.0, 1.25)),  # not all come back at once
            base_url=self._address.url,
            headers={"authorization": f"Bearer {self._address.key}"} if self._address.key else {},
            timeout=httpx.Timeout(60.0, connect=FIRST_CONTACT_S),
            limits=httpx.Limits(max_connections=None),
            event_hooks={"response": [self._note_answer]},
            verify=self._address.url.startswith("https:"),  # to prepare TLS takes 50 ms
        )

    async def _note_answer(self, _: httpx.Response) -> None:
        _answered.add(self._address.url)

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON. Raises SessionRefused and GatewayFault, with a sentence."""
        call, url = f"{method} {path}", self._address.url
        for is_first in (url not in _answered, False):
            try:
                async with clock.timeout(FIRST_CONTACT_S if is_first else None):
                    response = await self._http.request(method, path, json=body)
                break
            except (httpx.TransportError, TimeoutError):
                if not is_first or url not in _answered:
                    raise GatewayFault(f"{url} does not answer {call}: is a gateway there?") from None
        if response.is_success:
            return response.json()
        try:
            why = str(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            why = response.text[:200]
        refused = SessionRefused if response.status_code in (404, 409, 410) else GatewayFault
        raise refused(f"{call}: {response.status_code}: {why}")

    def wait_for(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of work in this client's loop, for code in other threads."""
        if threading.get_ident() == self._thread:
            work.close()
            raise RuntimeError("in a coroutine, use the method that begins with an `a`: `await s.areward(…)`")
        return _result(work, self._loop)

    def official(self, package: str, name: str, options: dict[str, Any]) -> Any:
        """The official client of this name with these options. Raises ImportError with a sentence."""
        with self._lock:
            if name not in self._official:
                try:
                    library = importlib.import_module(package)
                except ImportError as error:
                    raise ImportError(
                        f"{package} is not installed: `pip install {package}` ({error})"
                    ) from None
                self._official[name] = getattr(library, name)(max_retries=MODEL_CALL_RETRIES, **options)
        return self._official[name].with_options(**options)

    async def close(self) -> None:
        await self._http.aclose()
        for each in self._official.values():
            with suppress(RuntimeError):  # it was used in a loop that has ended
                if inspect.isawaitable(closing := each.close()):
                    await closing


@functools.cache
def _loop_of(pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()  # a process that was forked needs one of its own
    threading.Thread(target=loop.run_forever, name="weir client", daemon=True).start()
    return loop


def _result(work: Coroutine[Any, Any, Result], loop: asyncio.AbstractEventLoop) -> Result:
    running = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return running.result()
    except BaseException:
        running.cancel()
        raise


def in_background(function: Callable[Given, Coroutine[Any, Any, Result]]) -> Callable[Given, Result]:
    """The same function for code without an event loop."""

    @functools.wraps(function)
    def waiting(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        return _result(function(*args, **kwargs), _loop_of(os.getpid()))

    return waiting


class EpisodeEnding(NamedTuple):
    status: EndStatus
    reward: Reward = None
    reason: str = ""


def ending_after(error: BaseException | None) -> EpisodeEnding:
    """How an episode has ended that did not say it itself."""
    if error is None:
        return EpisodeEnding("completed")
    if not isinstance(error, Exception):
        return EpisodeEnding("abandoned", reason="the program was stopped")
    if fills_context(error):
        return EpisodeEnding("truncated", reason=CONTEXT_IS_FULL)
    return EpisodeEnding("failed", reason=f"{type(error).__name__}: {error}")


class AgentSession:
    """One episode: an address and a key for an agent. Coroutines use the methods that begin with an `a`."""

    def __init__(self, opened: Mapping[str, Any], client: GatewayRequests) -> None:
        self._client = client
        self.session_id: str = opened["session_id"]
        self.group_id: str | None = opened["group_id"]
        self.api_key: str = opened["api_key"]
        self.base_url: str = opened["base_url"]
        """For OpenAI's clients and what is built on them. Anthropic's take it without `/v1`."""
        self.total: Reward = None
        """The sum of its rewards so far."""
        self.verdict: Verdict | None = None
        """What becomes of the session, once it is ended: a code, and why."""

    @property
    def env(self) -> dict[str, str]:
        """The variables in which agents look for their model: `subprocess.run(…, env=os.environ | s.env)`."""
        urls = {"OPENAI_BASE_URL": self.base_url, "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1")}
        return {**urls, "OPENAI_API_KEY": self.api_key, "ANTHROPIC_API_KEY": self.api_key}

    def openai(self, **options: Any) -> "OpenAI":
        """OpenAI's client whose calls belong to this session; `options` are those of its `with_options`."""
        return cast("OpenAI", self._official("openai", "OpenAI", options))

    def async_openai(self, **options: Any) -> "AsyncOpenAI":
        return cast("AsyncOpenAI", self._official("openai", "AsyncOpenAI", options))

    def anthropic(self, **options: Any) -> "Anthropic":
        return cast("Anthropic", self._official("anthropic", "Anthropic", options))

    def async_anthropic(self, **options: Any) -> "AsyncAnthropic":
        return cast("AsyncAnthropic", self._official("anthropic", "AsyncAnthropic", options))

    def _official(self, package: str, name: str, options: dict[str, Any]) -> Any:
        own = {"base_url": self.env[f"{package.upper()}_BASE_URL"], "api_key": self.api_key}
        return self._client.official(package, name, own | options)

    def reward(self, value: float, turn_id: str | None = None, key: str | None = None) -> float:
        """Add a reward, to one call if `turn_id` names a completion. Returns the sum of the session's."""
        return self._client.wait_for(self.areward(value, turn_id, key))

    async def areward(self, value: float, turn_id: str | None = None, key: str | None = None) -> float:
        body = {"value": value, "turn_id": turn_id, "key": key or uuid.uuid4().hex}
        reply = await self._client.ask("POST", f"/sessions/{self.session_id}/reward", body)
        self.total = total = float(reply["reward"])
        return total

    def finish(self, status: EndStatus = "completed", reward: Reward = None, reason: str = "") -> Verdict:
        """End the session before the block does. Returns its verdict."""
        return self._client.wait_for(self.afinish(status, reward, reason))

    async def afinish(
        self, status: EndStatus = "completed", reward: Reward = None, reason: str = ""
    ) -> Verdict:
        body = {"status": status, "reward": reward, "reason": reason[:500] or None}
        reply = await self._client.ask("POST", f"/sessions/{self.session_id}/finish", body)
        self.total, self.verdict = reply["reward"], dict(reply["verdict"])
        return self.verdict


async def open_sessions(client: GatewayRequests, path: str, body: Any) -> list[AgentSession]:
    """Open the sessions of one request. Who is cancelled meanwhile ends them: the gateway may have opened
    them."""

    def sessions(reply: Mapping[str, Any]) -> list[AgentSession]:
        return [AgentSession(each, client) for each in reply.get("sessions", [reply])]

    opening = asyncio.ensure_future(client.ask("POST", path, body))
    try:
        return sessions(await asyncio.shield(opening))
    except asyncio.CancelledError as error:
        with suppress(TimeoutError, GatewayFault):
            async with clock.timeout(STOPS_WITHIN_S):
                await end_sessions(sessions(await opening), error)
        raise


async def end_sessions(sessions: Iterable[AgentSession], error: BaseException | None) -> None:
    """End those that have not ended, because of this error. A fault does not take the error's place."""
    ending, found = ending_after(error), list[object]()
    unfinished = (each.afinish(*ending) for each in sessions if each.verdict is None)
    with suppress(TimeoutError):
        async with clock.timeout(STOPS_WITHIN_S if ending.status == "abandoned" else None):
            found += await asyncio.gather(*unfinished, return_exceptions=True)
    for fault in found:
        if isinstance(fault, BaseException):
            if error is None:
                raise fault
            error.add_note(f"a session was not ended: {fault}")


class SessionBlock(Generic[Opened]):
    """`with` or `async with`: opens sessions by one request, and ends those that have not ended."""

    def __init__(self, given: GivenGateway, path: str, body: dict[str, Any]) -> None:
        self._given, self._path, self.body = given, path, body

    async def __aenter__(self) -> Opened:
        self._client = GatewayRequests(self._given)
        try:
            self._sessions = await open_sessions(self._client, self._path, self.body)
        except BaseException:
            await self._client.close()
            raise
        return cast(Opened, self._sessions if "size" in self.body else self._sessions[0])

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await asyncio.shield(self._end(error))

    async def _end(self, error: BaseException | None) -> None:
        try:
            await end_sessions(self._sessions, error)
        finally:
            await self._client.close()

    __enter__ = in_background(__aenter__)
    __exit__ = in_background(__aexit__)


def session(
    task_id: str | None = None, group: str | None = None, *, gateway: GivenGateway = None, **fields: Any
) -> SessionBlock[AgentSession]:
    """One session. `group` is the id of its group, whose other members may be opened elsewhere; `fields` are
    others of `POST /sessions`, such as `train` and `ttl_s`."""
    body = {"session_id": uuid.uuid4().hex, "task_id": task_id and id_of(task_id), "group_id": group}
    return SessionBlock(gateway, "/sessions", body | fields)


def group(
    task_id: object, n: int = 8, *, gateway: GivenGateway = None, **fields: Any
) -> SessionBlock[list[AgentSession]]:
    """`n` sessions of one task, whose rewards the trainer compares."""
    body = {"size": n, "task_id": id_of(task_id), "group_id": uuid.uuid4().hex}
    return SessionBlock(gateway, "/groups", body | fields)
