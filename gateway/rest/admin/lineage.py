"""The operators' routes from a version back to what taught it, and from a group to its advantages."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse, Response

from gateway.operators.groups import GroupShape, group_of
from gateway.operators.lineage import LineageShape, lineage_of
from gateway.parts import parts_of
from rollout_queue.protocol.policies import LARGEST

router = APIRouter()


@router.get("/policies/{version}/lineage", responses={200: {"model": LineageShape}})
async def lineage(
    version: Annotated[int, Path(ge=0, lt=LARGEST)],
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: str | None = None,
) -> Response:
    """The steps that made a version out of the published version before it, and a page of their turns.

    Redis has the last 50,000 steps, and turns as long as their sessions; so the trainer need not run.
    """
    return JSONResponse(await lineage_of(parts_of(request).redis, version, limit, cursor))


@router.get("/groups/{group_id}", responses={200: {"model": GroupShape}})
async def group(group_id: str, request: Request) -> Response:
    """A group with the reward, advantage and verdict of each member."""
    gateway = parts_of(request)
    return JSONResponse(await group_of(gateway.redis, gateway.sessions.verdicts, group_id))
