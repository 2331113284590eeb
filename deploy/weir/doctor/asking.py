"""Asks the services of a deployment, all at once, each for a bounded time.

gateway, Redis ─▶ where the servers and the trainer are ─▶ servers, trainer ─▶ facts
this machine ────────────────────────────────────────────────────────────────▶
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import TypeVar

import httpx
import msgspec

from rollout_queue import clock
from rollout_queue.contract.published_policy import Manifest
from rollout_queue.foreign_json import read_json
from rollout_queue.http.callers import bearer
from rollout_queue.protocol.gateway_messages import ServerStatus, SystemStatus
from rollout_queue.protocol.message import MalformedMessage
from weir.doctor.deployment_facts import MOST_APART_S, DeploymentFacts, Kind, MachineFacts, ServiceFacts
from weir.doctor.redis_health import read_redis
from weir.doctor.targets import Targets
from weir.doctor.this_machine import examine
from weir.stack.service_process import refusal_of

MACHINE_MORE_S = 5.0
"""How much longer than a service the disks of this machine may take."""
DATE_AGES_S = 1.5
"""uvicorn makes the header `Date` once a second, so a service that was busy for some seconds sends an old one
for as long, or for longer on a busy machine."""
MOST_DATES = 5
"""How often a clock that seems wrong is read."""
MOST_AT_ONCE = 64
"""How many services are asked at once."""
REPORTS: dict[Kind, str] = {
    "gateway": "/admin/status",
    "rollout_server": "/status",
    "trainer": "/status",
    "rewards": "/status",
}

T = TypeVar("T")


async def gather(targets: Targets) -> DeploymentFacts:
    """Ask all services. Each may hang twice, each time for `patience_s`."""
    patience_s = targets.patience_s
    machine = asyncio.ensure_future(_examined(targets))
    headers = bearer(targets.admin_key)
    of_servers = headers if targets.server_key is None else bearer(targets.server_key)
    limits = httpx.Limits(max_connections=2 * MOST_AT_ONCE)
    patient = httpx.Timeout(None)  # the clock bounds each question
    async with httpx.AsyncClient(headers=headers, timeout=patient, limits=limits) as http:
        gateway, redis = await asyncio.gather(
            _asked(http, _gateway(targets.gateway_url), headers, patience_s),
            read_redis(targets.redis_url, patience_s),
        )
        gateway, system = _system(gateway)
        report = redis.trainer if system is None else system.trainer
        trainer_url = report.url or targets.trainer_url
        wanted = [*_servers(system, targets), *_others(targets)]
        if trainer_url:
            wanted.append(ServiceFacts(kind="trainer", name="trainer", url=trainer_url))
        if public := targets.settings.get("gateway", {}).get("public_url"):
            wanted.append(_gateway(str(public).rstrip("/")))
        manifest = asyncio.ensure_future(_manifest(http, trainer_url, patience_s))
        asked = (
            _asked(http, each, of_servers if each.kind == "rollout_server" else headers, patience_s)
            for each in wanted
        )
        found = await asyncio.gather(*asked)
        newest = await manifest
    return DeploymentFacts(
        gateway=gateway,
        redis=redis,
        system=system,
        servers=tuple(_server(each) for each in found if each.kind == "rollout_server"),
        trainer=next((each for each in found if each.kind == "trainer"), None),
        others=tuple(each for each in found if each.kind == "rewards"),
        manifest=newest,
        public=next((each for each in found if each.kind == "gateway"), None),
        machine=await machine,
        settings=targets.settings,
        now=clock.now(),
    )


def _gateway(url: str) -> ServiceFacts:
    return ServiceFacts(kind="gateway", name="gateway", url=url)


def _servers(system: SystemStatus | None, targets: Targets) -> list[ServiceFacts]:
    """The rollout servers that the gateway knows, and the one that `weir up` has started."""
    known = system.rollout_servers if system is not None else ()
    found = [
        ServiceFacts(kind="rollout_server", name=each.id, url=each.url)
        for each in known
        if each.url is not None
    ]
    own = targets.stack.services.get("rollout_server") if targets.stack is not None else None
    if own is not None and own.url not in {each.url for each in found}:
        found.append(ServiceFacts(kind="rollout_server", name="rollout_server", url=own.url))
    return found


def _others(targets: Targets) -> list[ServiceFacts]:
    own = targets.stack.services.get("reward_service") if targets.stack is not None else None
    return [] if own is None else [ServiceFacts(kind="rewards", name="reward_service", url=own.url)]


async def _asked(
    http: httpx.AsyncClient, service: ServiceFacts, headers: dict[str, str], patience_s: float
) -> ServiceFacts:
    """What one service answers. A clock that seems wrong is read again, later."""
    answered, left = await _asked_once(http, service, headers, patience_s), MOST_DATES
    while abs(answered.clock_ahead_s or 0.0) > MOST_APART_S and (left := left - 1):
        await clock.sleep(DATE_AGES_S)  # until the server has made the header anew
        later = await _asked_once(http, service, headers, patience_s)
        if later.silent is not None:
            break
        answered = later
    return answered


async def _asked_once(
    http: httpx.AsyncClient, service: ServiceFacts, headers: dict[str, str], patience_s: float
) -> ServiceFacts:
    """What one service answers to `/ready` and to the request for its report."""
    try:
        async with clock.timeout(patience_s):
            before = clock.now()
            ready = await http.get(f"{service.url}/ready")
            after = clock.now()
            report = await http.get(service.url + REPORTS[service.kind], headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        late = f"no answer within {patience_s:g} s"
        return replace(
            service, silent=late if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        )
    return replace(
        service,
        unready=None if ready.status_code == 200 else refusal_of(ready.content, ready.status_code),
        key_refused=report.status_code in (401, 403),
        report_failed=(None if report.status_code == 200 else refusal_of(report.content, report.status_code)),
        body=report.content if report.status_code == 200 else b"",
        clock_ahead_s=_ahead(ready.headers.get("date"), before, after),
    )


def _ahead(date: str | None, before: float, after: float) -> float | None:
    """How far a clock is ahead that wrote this `Date`, which has whole seconds, between the two moments."""
    if date is None:
        return None
    try:
        said = parsedate_to_datetime(date).timestamp() + 0.5
    except ValueError:
        return None
    # The answer came at some moment in between, so only what lies outside of it is a difference.
    return said - after if said > after else said - before if said < before else 0.0


def _system(gateway: ServiceFacts) -> tuple[ServiceFacts, SystemStatus | None]:
    if not gateway.body:
        return gateway, None
    try:
        return gateway, SystemStatus.read(gateway.body)
    except MalformedMessage as error:
        return replace(gateway, report_unreadable=str(error)), None


def _server(service: ServiceFacts) -> tuple[ServiceFacts, ServerStatus | None]:
    if not service.body:
        return service, None
    try:
        return service, ServerStatus.read(service.body)
    except MalformedMessage as error:
        return replace(service, report_unreadable=str(error)), None


async def _manifest(http: httpx.AsyncClient, trainer_url: str | None, patience_s: float) -> Manifest | None:
    """The manifest of the newest version that the trainer has; None if there is none, or no answer."""
    if trainer_url is None:
        return None
    try:
        async with clock.timeout(patience_s):
            page = await http.get(f"{trainer_url}/weights")
            versions = read_json(page.content, _Versions).data
            if page.status_code != 200 or not versions:
                return None
            newest = max(each.version for each in versions)
            answer = await http.get(f"{trainer_url}/weights/{newest}/manifest.json")
            return read_json(answer.content, Manifest)
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, msgspec.DecodeError):
        return None


class _OnDisk(msgspec.Struct, frozen=True):
    version: int


class _Versions(msgspec.Struct, frozen=True):
    data: list[_OnDisk]


async def _examined(targets: Targets) -> MachineFacts:
    """What this machine has. A thread reads it, and is left behind if a disk hangs."""
    patience_s = targets.patience_s + MACHINE_MORE_S
    try:
        return await _in_thread(lambda: examine(targets), patience_s)
    except TimeoutError:
        return MachineFacts(failed=f"its disks did not answer within {patience_s:g} s")
    except OSError as error:
        return MachineFacts(failed=str(error))


async def _in_thread(work: Callable[[], T], timeout_s: float) -> T:
    """Run `work` in a thread that does not keep this process alive. Raises TimeoutError, and what `work`
    raises."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: Sequence[T], error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result[0])

    def run() -> None:
        result: list[T] = []
        failed: Exception | None = None
        try:
            result.append(work())
        except Exception as error:  # the awaiting task raises it
            failed = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, daemon=True, name="machine").start()
    async with clock.timeout(timeout_s):
        return await done
