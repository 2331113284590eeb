"""The trainer's REST API: status, ledger and weights; pause, resume, checkpoint and rollback.

It runs on its own thread, and exchanges data with the training thread only through `SharedState` and files.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Gauge

from rollout_queue import clock
from rollout_queue.contract.published_policy import MANIFEST
from rollout_queue.http.body_limit import BodyLimit
from rollout_queue.http.callers import CallerCheck, Keyring, admins_only
from rollout_queue.http.errors import ApiError, RequestIds, install_error_handlers
from rollout_queue.http.files import LargeFile
from rollout_queue.http.probe_routes import probes, text_of
from rollout_queue.model_files import FILE_NAME
from rollout_queue.protocol.rollout_server_messages import JoinBody
from rollout_queue.protocol.trainer_messages import (
    MOST_BUCKETS,
    MOST_METRIC_NAMES,
    MOST_METRICS,
    ROOM_ON_DISK,
    RestoreBody,
    TrainerReport,
)
from trainer_service.curves import IN_NO_NAME, Curves, KeptRuns
from trainer_service.publishing.tensor_sender import NotSent, TensorSender
from trainer_service.shared_state import NotRestorable, SharedState, StatusSnapshot
from trainer_service.storage.policy_store import PolicyStore
from trainer_service.storage.run_state import LedgerStep

LEDGER_LIMIT = 1000
TASKS_LIMIT = 1000
CHECKPOINT_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.05
DISCONNECT_POLL_S = 0.5
"""How often it is checked whether a rollout server still waits for a sender."""
STATUS = {"state", "step", "version", "waiting_for", "metrics", "model_checks"}
"""The fields of the trainer's report that `GET /status` returns."""

Ledger = Callable[[int, int], Sequence[LedgerStep]]
"""`ledger(since, limit)` returns up to `limit` durable steps with a number greater than `since`, oldest
first."""


def create_app(
    shared_state: SharedState,
    ledger: Ledger,
    store: PolicyStore,
    keyring: Keyring,
    registry: CollectorRegistry,
    sender: TensorSender | None = None,
    curves: Curves | None = None,
    public_url: str | None = None,
) -> FastAPI:
    """With a `sender`, rollout servers may ask it for the tensors of the newest version. Without `curves`,
    the run has none. At the host of `public_url`, the trainer answers also without keys."""
    app = FastAPI(title="Weir trainer", docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)
    app.add_middleware(BodyLimit)
    app.add_middleware(
        CallerCheck, keyring=keyring, callers={"admin", "rollout_server"}, public_url=public_url
    )
    app.add_middleware(RequestIds)

    async def readiness() -> str | None:
        return None if shared_state.ready else "the trainer is starting: it has not read the stream yet"

    app.include_router(probes(readiness, text_of(registry)))
    show_disk(store, registry)
    guarded = [Depends(admins_only)]
    app.include_router(_control(shared_state), dependencies=guarded)
    app.include_router(_ledger(ledger), dependencies=guarded)
    app.include_router(_tasks(shared_state), dependencies=guarded)
    app.include_router(_learning(curves or Curves(None), shared_state), dependencies=guarded)
    app.include_router(_weights(store))
    if sender is not None:
        app.include_router(_collective(sender))
    return app


def show_disk(store: PolicyStore, registry: CollectorRegistry) -> None:
    used = Gauge("weir_trainer_policies_bytes", "Bytes that published versions take", registry=registry)
    used.set_function(lambda: store.size)
    free = Gauge("weir_trainer_disk_free_bytes", "Free bytes on the disk of the versions", registry=registry)
    free.set_function(lambda: store.free)


async def _saved(shared_state: SharedState) -> StatusSnapshot:
    """Ask for a checkpoint. Raises ApiError if it is not durable in time, or the disk has no room."""
    asked, until = shared_state.request_checkpoint(), clock.monotonic() + CHECKPOINT_TIMEOUT_S
    while not asked.done() and clock.monotonic() < until:
        waits_for = shared_state.snapshot.waiting_for or ""
        if ROOM_ON_DISK in waits_for:
            why = f"the checkpoint is written later: the trainer waits for {waits_for}"
            raise ApiError(503, why, type="storage_unavailable")
        await clock.sleep(LOOK_EVERY_S)
    if not asked.done():
        raise ApiError(504, "the trainer is busy; it writes the checkpoint later")
    return asked.result()


def _control(shared_state: SharedState) -> APIRouter:
    router = APIRouter()

    @router.get("/status", response_model_include=STATUS)
    async def status() -> TrainerReport:
        """Numbers that are not finite become null, because JSON has no NaN."""
        return shared_state.snapshot.report().model_copy(update={"model_checks": shared_state.model_checks})

    @router.post("/pause")
    async def pause() -> JSONResponse:
        """Let the training pause before the next step."""
        shared_state.pause()
        return JSONResponse({"paused": True})

    @router.post("/resume")
    async def resume() -> JSONResponse:
        shared_state.resume()
        return JSONResponse({"paused": False})

    @router.post("/checkpoint")
    async def checkpoint() -> JSONResponse:
        """Write a checkpoint after the running step. The answer comes when the checkpoint is durable."""
        saved = await _saved(shared_state)
        return JSONResponse({"step": saved.step, "version": saved.version})

    @router.get("/rollback")
    async def rollbacks() -> JSONResponse:
        """The versions that the training can go back to, and when it did so."""
        state = shared_state.recovery
        return JSONResponse(
            {
                "versions": list(shared_state.restorable),
                "recoveries": msgspec.to_builtins(state.done),
                "lr_scale": state.rate_scale,
            }
        )

    @router.post("/rollback")
    async def rollback(body: RestoreBody) -> JSONResponse:
        """Continue from the weights and the optimizer of an older version, under a new version number. The
        answer comes when a checkpoint contains it."""
        try:
            asked = shared_state.request_rollback(body.version)
            async with clock.timeout(CHECKPOINT_TIMEOUT_S):
                found = await asyncio.wrap_future(asked)
        except TimeoutError as error:
            what = "did not go back" if asked.cancelled() else "still goes back: GET /rollback tells when"
            raise ApiError(504, f"the trainer is busy, and {what}") from error
        except NotRestorable as error:
            raise ApiError(404, str(error), param="version") from error
        return JSONResponse({"version": found.version, "restored": body.version, "step": found.step})

    return router


def _ledger(ledger: Ledger) -> APIRouter:
    router = APIRouter()

    @router.get("/ledger")
    def rows(
        since: int = Query(0, ge=0), limit: int = Query(LEDGER_LIMIT, ge=1, le=LEDGER_LIMIT)
    ) -> JSONResponse:
        """The turns that each durable step trained. With this list, anyone can check that no turn was trained
        twice."""
        found = ledger(since, limit + 1)
        page = found[:limit]
        next_cursor = str(page[-1].step) if len(found) > limit else None
        return JSONResponse({"data": msgspec.to_builtins(page), "next_cursor": next_cursor})

    return router


def _tasks(shared_state: SharedState) -> APIRouter:
    router = APIRouter()

    @router.get("/tasks")
    def tasks(cursor: str = "", limit: int = Query(TASKS_LIMIT, ge=1, le=TASKS_LIMIT)) -> JSONResponse:
        """How often the policy solves each task, and the weight that the curriculum gives to it. By these
        weights, environments can choose the tasks that they sample."""
        found = sorted(
            (each for each in shared_state.tasks if each.task_id > cursor), key=lambda each: each.task_id
        )
        page = found[:limit]
        data = [
            {"task_id": each.task_id, "pass_rate": each.pass_rate, "weight": each.weight} for each in page
        ]
        return JSONResponse({"data": data, "next_cursor": page[-1].task_id if len(found) > limit else None})

    return router


def _learning(curves: Curves, shared_state: SharedState) -> APIRouter:
    router, kept_runs = APIRouter(), KeptRuns(curves.path)

    @router.get("/learning")
    def learning(
        metrics: str = Query("", max_length=MOST_METRIC_NAMES),
        first: int | None = Query(None, alias="from", ge=0),
        last: int | None = Query(None, alias="to", ge=0),
        buckets: int = Query(MOST_BUCKETS, ge=1, le=MOST_BUCKETS),
        run: str | None = None,
    ) -> JSONResponse:
        """The curves of some metrics, whose names have commas between them; those of this run, or of the kept
        one that `run` names. While `complete` is false, the next request reads on. `recoveries` are the times
        that the training was set back."""
        names = [name for name in metrics.split(",") if name]
        if len(names) > MOST_METRICS:
            raise ApiError(400, f"at most {MOST_METRICS} metrics are read at once", param="metrics")
        if odd := next(filter(IN_NO_NAME.search, names), None):
            raise ApiError(400, f"no metric has the name {odd!r}", param="metrics")
        chosen = curves if run is None else kept_runs.curves(run)
        if chosen is None:
            raise ApiError(404, f"no run {run!r} is kept: GET /learning/runs lists them", param="run")
        found: dict[str, Any] = msgspec.to_builtins(chosen.read(names, first, last, buckets))
        recoveries = shared_state.recovery.done if run is None else []
        return JSONResponse(found | {"recoveries": msgspec.to_builtins(recoveries)})

    @router.get("/learning/runs")
    def runs() -> JSONResponse:
        """The other runs whose metrics lie beside those of this one, the newest first."""
        return JSONResponse({"data": msgspec.to_builtins(kept_runs.listed()), "next_cursor": None})

    return router


def _weights(store: PolicyStore) -> APIRouter:
    router = APIRouter()

    @router.get("/weights")
    def versions() -> JSONResponse:
        """Every version on this disk with the bytes that it takes, and the bytes that are free."""
        data = [{"version": v, "size_bytes": store.size_of(v)} for v in store.versions()]
        return JSONResponse({"data": data, "next_cursor": None, "free_bytes": store.free})

    @router.get("/weights/{version}/{name}")
    def file(version: int, name: str) -> Response:
        """One file of a complete version, for example its manifest."""
        path = _published_file(store, version, name)
        media_type = "application/json" if name == MANIFEST else "application/octet-stream"
        return LargeFile(path, media_type=media_type)

    return router


def _collective(sender: TensorSender) -> APIRouter:
    router = APIRouter(prefix="/collective")

    @router.get("/{version}")
    async def held(version: int) -> JSONResponse:
        """Whether the tensors of a version can be sent."""
        return JSONResponse({"version": version, "held": sender.holds(version)})

    @router.post("/{version}")
    async def join(version: int, body: JoinBody, request: Request) -> JSONResponse:
        """Send the tensors of a version to an engine. The answer says where the engine joins, and comes when
        a sender waits for it there."""
        try:
            answer = asyncio.wrap_future(sender.join(version, body))
            until_s = clock.monotonic() + body.wait_s
            while not answer.done() and clock.monotonic() < until_s and not await request.is_disconnected():
                with suppress(TimeoutError):
                    async with clock.timeout(min(body.wait_s, DISCONNECT_POLL_S)):
                        await asyncio.wait({answer})
            if not answer.done():
                answer.cancel()
                raise ApiError(503, "every sender is busy", type="storage_unavailable")
            joining = await answer
        except NotSent as error:
            raise ApiError(410, str(error)) from error
        return JSONResponse(joining.model_dump(mode="json"))

    @router.delete("/{group}")
    async def end(group: str) -> JSONResponse:
        """The engine has the tensors, or will not take them."""
        return JSONResponse({"ended": sender.end(group)})

    return router


def _published_file(store: PolicyStore, version: int, name: str) -> Path:
    """The path of a version's file. `name` is compared with the names of existing files; no path is built
    from it. Raises ApiError."""
    if FILE_NAME.fullmatch(name) and version in store.versions():
        with suppress(FileNotFoundError):  # the training thread may remove the version meanwhile
            for path in store.path_of(version).iterdir():
                if path.name == name and path.is_file() and not path.is_symlink():
                    return path
    raise ApiError(404, f"version {version} has no file of that name")
