"""The routes `/live`, `/ready` and `/metrics`, for GET and HEAD, which each service answers without a key.

They name the release that a process runs: its package's version, the schema of its records, and its very
build.
"""

import hashlib
import logging
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from rollout_queue.contract.codec import SCHEMA
from rollout_queue.http.errors import ApiError

logger = logging.getLogger(__name__)

Readiness = Callable[[], Awaitable[str | ApiError | None]]
"""Returns why the service cannot do its work; None when it can. A text is a 503 `engine_unavailable`."""


MetricsText = Callable[[], Awaitable[bytes]]
"""Returns the metrics in Prometheus' text format."""


def probes(readiness: Readiness, metrics_text: MetricsText) -> APIRouter:
    router = APIRouter(tags=["probes"])
    last: str | ApiError | None = None

    @router.head("/live", include_in_schema=False)
    @router.get("/live")
    async def live() -> JSONResponse:
        """The process runs."""
        return JSONResponse({"live": True})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        """The service can do its work; 503 with the reason otherwise."""
        nonlocal last
        reason = await readiness()
        if last is not None and reason is None:
            logger.info("ready again: it was not, because %s", last)  # `weir doctor` reads it
        last = reason
        if not reason:
            return JSONResponse({"ready": True})
        return (reason if isinstance(reason, ApiError) else ApiError(503, reason)).response()

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(await metrics_text(), media_type=CONTENT_TYPE_LATEST)

    return router


def text_of(registry: CollectorRegistry) -> MetricsText:
    """The metrics of one registry."""

    async def text() -> bytes:
        return generate_latest(registry)

    return text


PACKAGE = Path(__file__).parents[1]
"""What the services share, so that all services of one build have it alike."""


@cache
def release() -> str:
    """For instance `0.1.0, schema 1, build 3f2a9c1e`. Services with the same schema understand each other's
    records; those with the same text have the same code in common."""
    try:
        number = version("weir-rl")
    except PackageNotFoundError:  # started from a source tree that is not installed
        number = "source"
    return f"{number}, schema {SCHEMA}, build {_build()}"


def _build() -> str:
    """A digest of the source files that all services have."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]
