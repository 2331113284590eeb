"""The operator's routes: what the dispatcher does, and its dead letters."""

import dataclasses

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from reward_service.dispatch.dispatcher import Dispatcher
from rollout_queue.http.callers import admins_only


def dispatch_routes(dispatcher: Dispatcher, isolated: bool | None) -> APIRouter:
    """`isolated`: whether Python graders are; None if nobody has tried."""
    router = APIRouter(tags=["dispatch"], dependencies=[Depends(admins_only)])

    @router.get("/status")
    async def status() -> JSONResponse:
        """How many sessions wait for each rule, the last dead letters, and if Python graders are isolated."""
        memory = dispatcher.memory
        return JSONResponse(
            {
                "gateway_fault": dispatcher.gateway_fault,
                "waiting": dict(dispatcher.waiting),
                "in_work": memory.in_work,
                "remembered": memory.remembered,
                "python_isolated": isolated,
                "dead_letters": [dataclasses.asdict(each) for each in memory.letters],
            }
        )

    @router.post("/dead_letters/retry")
    async def retry() -> JSONResponse:
        """Try all dead letters again, with all attempts."""
        return JSONResponse({"retried": dispatcher.memory.revive()})

    return router
