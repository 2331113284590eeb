"""The rollout server's HTTP face: change the weights, ask for the state, take it out of rotation."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from rollout_queue.http.errors import RequestIds, install_error_handlers
from rollout_queue.http.keys import Keyring
from rollout_queue.http.probes import probes
from rollout_server.reload import Wanted
from rollout_server.server import RolloutServer


class ReloadBody(BaseModel):
    """Which version to serve, and where its files are; null for the version that the engine started with."""

    model_config = ConfigDict(extra="forbid")

    version: int = Field(ge=0, lt=2**63, strict=True)
    location: str | None = Field(None, max_length=4096)
    manifest_sha256: str | None = Field(None, pattern="^[0-9a-fA-F]{64}$")
    force: bool = False
    """Serve it although it is lower than what is served, or the same number with other content."""


def create_app(server: RolloutServer, keyring: Keyring) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await server.open()
        yield
        await server.close()

    app = FastAPI(title="Weir rollout server", lifespan=lifespan)
    app.add_middleware(RequestIds)
    install_error_handlers(app)
    app.include_router(probes(server.unready_because, server.metrics.registry))
    app.include_router(_operations(server), dependencies=[Depends(keyring.require_admin)])
    return app


def _operations(server: RolloutServer) -> APIRouter:
    router = APIRouter(tags=["rollout server"])

    @router.post("/reload")
    async def reload(body: ReloadBody) -> JSONResponse:
        """Fetch, verify and load a version; the old one goes on serving whatever goes wrong."""
        wanted = Wanted(body.version, body.location, body.manifest_sha256)
        seconds = await server.reloader.reload(wanted, force=body.force)
        parts = {"fetch": seconds.fetch, "verify": seconds.verify, "load": seconds.load}
        answer = {"ok": True, "version": body.version, "seconds": parts, "paused_s": seconds.paused}
        return JSONResponse(answer)

    @router.get("/status")
    async def status() -> JSONResponse:
        return JSONResponse(await _status(server))

    @router.post("/drain")
    async def drain() -> JSONResponse:
        """Leave rotation; what runs goes on."""
        server.engine.draining = True
        return JSONResponse(await _status(server))

    @router.post("/resume")
    async def resume() -> JSONResponse:
        """Come back into rotation."""
        server.engine.draining = False
        return JSONResponse(await _status(server))

    return router


async def _status(server: RolloutServer) -> dict[str, Any]:
    running, waiting = await server.load_counts()
    engine = server.engine
    return {
        "state": engine.state,
        "version": engine.policy.version,
        "manifest_sha256": engine.policy.manifest_sha256,
        "engine_url": server.engine_url,
        "restarts": engine.restarts,
        "running": running,
        "waiting": waiting,
    }
