"""The rollout server's HTTP routes: load a version, report the state, leave rotation and come back, and give
the engine's memory away. Also those by which prime-rl's orchestrator controls an engine of vLLM."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rollout_queue.http.api_page import api_page
from rollout_queue.http.body_limit import BodyLimit
from rollout_queue.http.callers import CallerCheck, Keyring
from rollout_queue.http.errors import ApiError, RequestIds, install_error_handlers
from rollout_queue.http.files import LargeFile
from rollout_queue.http.probe_routes import probes, release, text_of
from rollout_queue.protocol.gateway_messages import ServerStatus
from rollout_queue.protocol.rollout_server_messages import (
    Aborted,
    AdapterShape,
    EngineRouteDone,
    LoadAdapterBody,
    LoadedAdapters,
    MemoryReleased,
    MemoryResumed,
    ReleaseBody,
    ReloadBody,
    Reloaded,
    ReloadSeconds,
    ResumeBody,
    UpdateWeightsBody,
    WantedAdapters,
)
from rollout_queue.tracing import span
from rollout_server.engine.engine import Engine, ServerState
from rollout_server.errors import ReloadError
from rollout_server.server import RolloutServer
from rollout_server.weights.locations import WantedPolicy


def create_app(server: RolloutServer, keyring: Keyring) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await server.open()
        yield
        await server.close()

    app = FastAPI(title="Weir rollout server", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit)
    app.add_middleware(
        CallerCheck, keyring=keyring, callers={"admin", "rollout_server"}, public_url=server.public_url
    )
    app.add_middleware(RequestIds)
    install_error_handlers(app)
    app.add_exception_handler(ReloadError, _refused)
    app.include_router(probes(server.unready_because, text_of(server.metrics.registry)))
    app.include_router(_health(server))
    for routes in (_reloading, _adapters, _memory, _rotation, _orchestrated):
        app.include_router(routes(server), tags=["rollout server"])
    app.include_router(api_page(app))
    return app


def _reloading(server: RolloutServer) -> APIRouter:
    router = APIRouter()

    @router.post("/reload")
    async def reload(body: ReloadBody, request: Request) -> JSONResponse:
        """Fetch, verify and load a version. If any of this fails, the server keeps the former version."""
        with span("POST /reload", "server", parent=request.headers.get("traceparent")) as traced:
            traced.set(
                {"rl.policy.version": body.version, "rl.server": server.name, "rl.prepare": body.prepare}
            )
            return await loaded(body)

    async def loaded(body: ReloadBody) -> JSONResponse:
        wanted = WantedPolicy(body.version, body.location, body.manifest_sha256, body.peer)
        await server.reloads.begin(body.push, force=body.force)
        if body.prepare:
            seconds = await server.reloads.run(body.version, server.reloader.prefetch(wanted))
        else:
            # Whoever pushes to many servers lets others load meanwhile, and asks again.
            patient = body.push is None
            reload = server.reloader.reload(wanted, force=body.force, patient=patient)
            seconds = await server.reloads.run(body.version, reload)
            server.reloads.proved(body.version, body.push)
        parts = ReloadSeconds(fetch=seconds.fetch, verify=seconds.verify, load=seconds.load)
        answer = Reloaded(
            ok=True,
            version=server.engine.policy.version,
            prepared=body.version if body.prepare else None,
            seconds=parts,
            paused_s=seconds.paused,
            adapters=_shapes(server.engine),
            fallback=seconds.fallback,
        )
        return JSONResponse(answer.model_dump())

    @router.delete("/reload/{version}")
    async def abort(version: int) -> JSONResponse:
        """End every reload of the version that has not paused the engine yet."""
        aborted = await server.reloads.abort(version)
        answer = Aborted(
            version=server.engine.policy.version,
            aborted=aborted,
            loading=server.reloader.loading,
            adapters=_shapes(server.engine),
        )
        return JSONResponse(answer.model_dump())

    @router.get("/weights/{version}/{manifest_sha256}/{name}")
    def weights(version: int, manifest_sha256: str, name: str) -> LargeFile:
        """One file of a version that was verified here, for another rollout server."""
        path = server.store.offered(version, manifest_sha256, name)
        if path is None:
            raise ApiError(404, f"version {version} has no file {name!r} here", type="not_found")
        return LargeFile(path, media_type="application/octet-stream")

    return router


def _adapters(server: RolloutServer) -> APIRouter:
    router = APIRouter()

    @router.post("/adapters")
    async def settle(body: WantedAdapters) -> JSONResponse:
        """Have exactly these adapters beside the policy. The answer says which ones are loaded."""
        server.adapters.want(body)
        answer = LoadedAdapters(results=await server.adapters.settle())
        return JSONResponse(answer.model_dump())

    return router


def _rotation(server: RolloutServer) -> APIRouter:
    router = APIRouter()

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
        """End a pause; without one, come back into rotation."""
        if not await server.orchestrated.resume():
            server.engine.draining = False
        return await _status(server)

    return router


def _orchestrated(server: RolloutServer) -> APIRouter:
    router = APIRouter()

    @router.post("/pause")
    async def pause(mode: str = "abort", clear_cache: bool = True) -> JSONResponse:
        """Let nothing run until `POST /resume`. The defaults are vLLM's; only the mode `keep` is served."""
        await server.orchestrated.pause(mode, clear_cache=clear_cache)
        return _done(server.engine.policy.version)

    @router.post("/update_weights")
    async def update_weights(body: UpdateWeightsBody) -> JSONResponse:
        """Serve the weights in a directory. If this fails, the server keeps the former version."""
        return _done(await server.orchestrated.update_weights(body.weight_dir))

    @router.post("/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapterBody) -> JSONResponse:
        """Publish the adapter in a directory as a policy of its own."""
        return _done(await server.orchestrated.load_adapter(body.lora_name, body.lora_path))

    return router


def _done(version: int) -> JSONResponse:
    return JSONResponse(EngineRouteDone(version=version).model_dump())


def _health(server: RolloutServer) -> APIRouter:
    router = APIRouter(tags=["rollout server"])

    @router.get("/health")
    async def health() -> JSONResponse:
        """Whether the engine runs, paused or not, in rotation or not."""
        if not server.engine.serving:
            raise ApiError(503, f"the engine is {server.engine.state.value}", type="engine_unavailable")
        return JSONResponse({"status": "ok"})

    return router


def _memory(server: RolloutServer) -> APIRouter:
    router = APIRouter(tags=["memory"])

    @router.post("/memory/release")
    async def release_memory(body: ReleaseBody) -> JSONResponse:
        """Give the engine's memory to a trainer. Calls wait meanwhile. If the memory is given away already,
        `for_s` begins anew."""
        renewed = await server.memory.release(body.holder, body.for_s)
        return JSONResponse(
            MemoryReleased(version=server.engine.policy.version, renewed=renewed).model_dump()
        )

    @router.post("/memory/resume")
    async def resume_memory(body: ResumeBody) -> JSONResponse:
        """Take the memory back, and sample with the version that it had, or with one that waits to be loaded.
        Does nothing if the memory is not given away."""
        await server.memory.resume(body.holder)
        return JSONResponse(MemoryResumed(version=server.engine.policy.version).model_dump())

    return router


async def _status(server: RolloutServer) -> JSONResponse:
    engine, load = server.engine, await server.load()
    status = ServerStatus(
        id=server.name,
        process=server.process,
        state="loading" if engine.state is ServerState.RELEASED else engine.state.value,
        released=engine.withheld,
        version=engine.policy.version,
        manifest_sha256=engine.policy.manifest_sha256,
        push=server.reloads.push_of(engine.policy.version),
        adapters=_shapes(engine),
        engine_url=server.engine_url,
        restarts=engine.restarts,
        running=load.running,
        waiting=load.waiting,
        kv_usage=load.kv_usage,
        release=release(),
        model_checks=server.store.expected.checks,
    )
    return JSONResponse(status.model_dump())


def _shapes(engine: Engine) -> tuple[AdapterShape, ...]:
    adapters = [
        AdapterShape(version=each.version, name=name, policy=each.name)
        for name, each in engine.adapters.loaded.items()
    ]
    if not adapters:
        return ()
    return (AdapterShape(version=engine.policy.weights.version, name=None), *adapters)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ReloadError)  # noqa: S101 - registered for this class alone
    answer = ApiError(error.status, str(error), type=error.type, param=error.param, code=error.code)
    return answer.response()
