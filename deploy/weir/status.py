"""`weir status`: the services, their addresses and what the gateway says of them, in lines of any length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
from rich.text import Text

from rollout_queue import clock
from rollout_queue.protocol.conditions import TRAINER_SILENT_S, counted
from rollout_queue.protocol.gateway_messages import SystemStatus
from rollout_queue.protocol.message import MalformedMessage
from rollout_queue.redis.settings import RedisSettings, without_password
from weir.stack.service_process import (
    Readiness,
    http_ready,
    ready_of,
    redis_ready,
    reward_status,
    system_status,
)
from weir.stack.stack_state import ProcessState, StackState


@dataclass(frozen=True)
class ServiceStatus:
    """The present state of one service."""

    name: str
    pid: int | None
    """None for a service that `weir up` has not started."""
    state: str
    address: str
    detail: str

    @property
    def up(self) -> bool:
        return self.state == "ready"


def rows_of(found: StackState, admin_key: str | None) -> list[ServiceStatus]:
    """The state of every service; the details come from the gateway, if it answers."""
    details = _details(found, admin_key) | _reward_details(found, admin_key)
    return [_row(name, service, details.get(name, "")) for name, service in found.services.items()]


def rows_elsewhere(gateway_url: str, redis: RedisSettings, admin_key: str | None) -> list[ServiceStatus]:
    """The state of services that something other than `weir up` started (compose, say), from the gateway."""
    rows = [
        _probed("redis", without_password(redis.redis_url), redis_ready(redis)),
        _probed("gateway", gateway_url, http_ready(gateway_url)),
    ]
    try:
        report = system_status(gateway_url, admin_key)
    except (OSError, MalformedMessage) as error:
        return [*rows[:1], _with_detail(rows[1], f"no answer from /admin/status: {error}")]
    details = details_from(report)
    rows = [_with_detail(row, details[row.name]) for row in rows]
    for server in report.rollout_servers:
        detail = "; ".join(filter(None, [_facts(version=server.version), server.error]))
        rows.append(ServiceStatus(server.id, None, server.state, server.url or server.engine_url, detail))
    trainer = report.trainer
    reported_at = trainer.last_seen or 0.0
    alive = clock.now() - reported_at <= TRAINER_SILENT_S
    rows.append(
        ServiceStatus(
            "trainer_service",
            None,
            "ready" if alive else "down",
            trainer.url or "",
            details["trainer_service"],
        )
    )
    return rows


def _probed(name: str, url: str, ready: Readiness) -> ServiceStatus:
    reason = ready()
    scheme, _, rest = url.rpartition("://")
    address = f"{scheme}://{rest.rpartition('@')[2]}"  # without a password
    return ServiceStatus(name, None, "not ready" if reason else "ready", address, reason or "")


def _with_detail(row: ServiceStatus, detail: str) -> ServiceStatus:
    return row if row.detail else replace(row, detail=detail)


def lines_of(rows: Sequence[ServiceStatus]) -> Iterator[Text]:
    """A line for each service, and below it what it says of itself."""
    wide = max((len(row.name) for row in rows), default=0)
    for row in rows:
        pid = f"  pid {row.pid}" if row.pid else ""
        state = (f"{row.state:9}", "green" if row.up else "red")
        yield Text.assemble(f"{row.name:{wide}}  ", state, f"  {row.address}{pid}")
        yield from (Text(f"    {part}") for part in row.detail.split("; ") if part)


def _row(name: str, service: ProcessState, detail: str) -> ServiceStatus:
    if service.process() is None:
        return ServiceStatus(name, service.pid, "down", without_password(service.url), f"log: {service.log}")
    reason = ready_of(service.url)()
    restarts = f"restarts: {service.restarts}" if service.restarts else ""
    text = "; ".join(part for part in (reason or detail, restarts) if part)
    address = without_password(service.url)
    return ServiceStatus(name, service.pid, "not ready" if reason else "ready", address, text)


def _details(found: StackState, admin_key: str | None) -> dict[str, str]:
    gateway = found.services.get("gateway")
    if gateway is None:
        return {}
    try:
        return details_from(system_status(gateway.url, admin_key))
    except (OSError, MalformedMessage) as error:
        return {"gateway": f"no answer from /admin/status: {error}"}


def _reward_details(found: StackState, admin_key: str | None) -> dict[str, str]:
    """The facts of the reward service; empty if it does not run, or tells nothing."""
    service = found.services.get("reward_service")
    if service is None or service.process() is None:
        return {}
    try:
        report = reward_status(service.url, admin_key)
    except (OSError, msgspec.DecodeError) as error:
        return {"reward_service": f"no answer from /status: {error}"}
    dead = counted(len(report.dead_letters), "dead letter")
    facts = f"{counted(report.in_work, 'session')} in work, {dead}"
    alone = "" if report.python_isolated is not False else "; Python graders are not isolated"
    return {"reward_service": facts + alone}


def details_from(status: SystemStatus) -> dict[str, str]:
    """For each service, the few facts of GET /admin/status that fit on one line."""
    policy, trainer, queue = status.policy, status.trainer, status.queue
    return {
        "gateway": _facts(serves_version=policy.serving, target=_other(policy.target, policy.serving))
        + "".join(f"; {warning}" for warning in status.warnings),
        "rollout_server": ", ".join(
            _facts(version=server.version) + (f" ({server.error})" if server.error else "")
            for server in status.rollout_servers
        ),
        "trainer_service": _facts(state=trainer.state, step=trainer.step, version=trainer.version)
        + (f"; waits for {trainer.waiting_for}" if trainer.waiting_for else ""),
        "redis": (
            f"{counted(queue.stream_length, 'record')} for the trainer, "
            f"{counted(queue.sessions, 'session')}, {queue.unfinished_sessions} unfinished, "
            f"{counted(queue.dead_letters, 'dead letter')}"
        ),
    }


def _facts(**facts: object) -> str:
    named = {name.replace("_", " "): value for name, value in facts.items() if value is not None}
    return ", ".join(f"{name} {value}" for name, value in named.items())


def _other(value: int | None, than: int | None) -> int | None:
    return None if value == than else value
