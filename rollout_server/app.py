"""The rollout server's HTTP routes: load a version, report the state, leave rotation and come back."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from rollout_queue.http.errors import ApiError, RequestIds, install_error_handlers
from rollout_queue.http.keys import Keyring
from rollout_queue.http.probes import probes, text_of
from rollout_queue.protocol.reload import Aborted, ReloadBody, Reloaded, ReloadSeconds
from rollout_queue.protocol.status import ServerStatus
from rollout_server.errors import ReloadError
from rollout_server.server import RolloutServer
from rollout_server.weights.policy import WantedPolicy


def create_app(server: RolloutServer, keyring: Keyring) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await server.open()
        yield
        await server.close()

    app = FastAPI(title="Weir rollout server", lifespan=lifespan)
    app.add_middleware(RequestIds)
    install_error_handlers(app)
    app.add_exception_handler(ReloadError, _refused)
    app.include_router(probes(server.unready_because, text_of(server.metrics.registry)))
    app.include_router(_operations(server), dependencies=[Depends(keyring.require_admin)])
    return app


def _operations(server: RolloutServer) -> APIRouter:
    router = APIRouter(tags=["rollout server"])

    @router.post("/reload")
    async def reload(body: ReloadBody) -> JSONResponse:
        """Fetch, verify and load a version. If any of this fails, the server keeps the former version."""
        wanted = WantedPolicy(body.version, body.location, body.manifest_sha256, body.peer)
        await server.reloads.begin(body.push, force=body.force)
        if body.prepare:
            seconds = await server.reloads.run(body.version, server.reloader.prefetch(wanted))
        else:
            reload = server.reloader.reload(wanted, force=body.force)
            seconds = await server.reloads.run(body.version, reload)
        parts = ReloadSeconds(fetch=seconds.fetch, verify=seconds.verify, load=seconds.load)
        answer = Reloaded(
            ok=True,
            version=server.engine.policy.version,
            prepared=body.version if body.prepare else None,
            seconds=parts,
            paused_s=seconds.paused,
            fallback=seconds.fallback,
        )
        return JSONResponse(answer.model_dump())

    @router.delete("/reload/{version}")
    async def abort(version: int) -> JSONResponse:
        """End every reload of the version that has not paused the engine yet."""
        aborted = await server.reloads.abort(version)
        answer = Aborted(
            version=server.engine.policy.version, aborted=aborted, loading=server.reloader.loading
        )
        return JSONResponse(answer.model_dump())

    @router.get("/weights/{version}/{manifest_sha256}/{name}")
    def weights(version: int, manifest_sha256: str, name: str) -> FileResponse:
        """One file of a version that was verified here, for another rollout server."""
        path = server.store.offered(version, manifest_sha256, name)
        if path is None:
            raise ApiError(404, f"version {version} has no file {name!r} here", type="not_found")
        return FileResponse(path, media_type="application/octet-stream")

    @router.get("/status")
    async def status() -> JSONResponse:
        return await _status(server)

    @router.post("/drain")
    async def drain() -> JSONResponse:
        """Leave rotation: gateways send this server no new requests, and running requests continue."""
        server.engine.draining = True
        return await _status(server)

    @router.post("/resume")
    async def resume() -> JSONResponse:
        """Come back into rotation."""
        server.engine.draining = False
        return await _status(server)

    return router


async def _status(server: RolloutServer) -> JSONResponse:
    running, waiting = await server.load_counts()
    engine = server.engine
    status = ServerStatus(
        id=server.name,
        process=server.process,
        state=engine.state.value,
        version=engine.policy.version,
        manifest_sha256=engine.policy.manifest_sha256,
        engine_url=server.engine_url,
        restarts=engine.restarts,
        running=running,
        waiting=waiting,
    )
    return JSONResponse(status.model_dump())


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ReloadError)  # noqa: S101 - registered for this class alone
    answer = ApiError(error.status, str(error), type=error.type, param=error.param, code=error.code)
    return answer.response()
