"""Builds a body of `GET /admin/status`; a test gives only the fields that matter to it."""

from rollout_queue.protocol.gateway_messages import QueueReport, ServerShape, ServingShape, SystemStatus
from rollout_queue.protocol.trainer_messages import TrainerReport


def system_status(
    policy: ServingShape | None = None,
    trainer: TrainerReport | None = None,
    queue: QueueReport | None = None,
    servers: tuple[ServerShape, ...] = (),
    warnings: tuple[str, ...] = (),
) -> SystemStatus:
    return SystemStatus(
        policy=policy or ServingShape(serving=None, target=None),
        rollout_servers=servers,
        trainer=trainer or TrainerReport(),
        queue=queue
        or QueueReport(stream_length=0, sessions=0, unfinished_sessions=0, verdicts={}, dead_letters=0),
        warnings=warnings,
    )


def server_shape(server_id: str, version: int, error: str | None = None) -> ServerShape:
    """A rollout server that is ready and serves `version`."""
    return ServerShape(
        id=server_id,
        url=f"http://{server_id}",
        engine_url=f"http://{server_id}-engine",
        state="ready",
        version=version,
        in_flight=0,
        breaker="closed",
        last_seen=1.0,
        error=error,
    )
