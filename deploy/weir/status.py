"""`weir status`: one table of the services, their addresses and the gateway's report of each."""

from dataclasses import dataclass

from rich.table import Table

from rollout_queue.protocol.message import MalformedMessage
from rollout_queue.protocol.status import SystemStatus
from weir.stack.probes import http_ready, redis_ready, system_status
from weir.stack.state import ProcessState, StackState


@dataclass(frozen=True)
class ServiceStatus:
    """The present state of one service."""

    name: str
    pid: int
    state: str
    address: str
    detail: str

    @property
    def up(self) -> bool:
        return self.state == "ready"


def rows_of(found: StackState, admin_key: str | None) -> list[ServiceStatus]:
    """The state of every service; the details come from the gateway, if it answers."""
    details = _details(found, admin_key)
    return [_row(name, service, details.get(name, "")) for name, service in found.services.items()]


def table_of(rows: list[ServiceStatus]) -> Table:
    table = Table("service", "pid", "state")
    table.add_column("address", no_wrap=True)
    table.add_column("detail")
    for row in rows:
        colour = "green" if row.up else "red"
        table.add_row(row.name, str(row.pid), f"[{colour}]{row.state}[/]", row.address, row.detail)
    return table


def _row(name: str, service: ProcessState, detail: str) -> ServiceStatus:
    if service.process() is None:
        return ServiceStatus(name, service.pid, "down", service.url, f"log: {service.log}")
    ready = redis_ready(service.url) if service.url.startswith("redis:") else http_ready(service.url)
    reason = ready()
    restarts = f"restarts: {service.restarts}" if service.restarts else ""
    text = "; ".join(part for part in (reason or detail, restarts) if part)
    return ServiceStatus(name, service.pid, "not ready" if reason else "ready", service.url, text)


def _details(found: StackState, admin_key: str | None) -> dict[str, str]:
    gateway = found.services.get("gateway")
    if gateway is None:
        return {}
    try:
        return details_from(system_status(gateway.url, admin_key))
    except (OSError, MalformedMessage) as error:
        return {"gateway": f"no answer from /admin/status: {error}"}


def details_from(status: SystemStatus) -> dict[str, str]:
    """The few facts of GET /admin/status that fit on a line each."""
    policy, trainer, queue = status.policy, status.trainer, status.queue
    return {
        "gateway": _facts(serving=policy.serving, target=policy.target)
        + "".join(f"; {warning}" for warning in status.warnings),
        "rollout_server": ", ".join(_facts(version=server.version) for server in status.rollout_servers),
        "trainer_service": _facts(state=trainer.state, step=trainer.step, version=trainer.version),
        "redis": _facts(
            stream_length=queue.stream_length,
            sessions=queue.sessions,
            unfinished_sessions=queue.unfinished_sessions,
            dead_letters=queue.dead_letters,
        ),
    }


def _facts(**facts: object) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
