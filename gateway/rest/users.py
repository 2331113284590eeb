"""`DELETE /admin/users/{user}/data`: deletes all data of one user; later calls for that name are refused."""

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from gateway.rest.access import admins_only
from gateway.rest.shapes import DeletedUserShape
from gateway.wiring import parts_of
from rollout_queue.protocol.ids import Id

router = APIRouter(prefix="/admin/users", tags=["admin"], dependencies=[Depends(admins_only)])


@router.delete("/{user}/data", responses={200: {"model": DeletedUserShape}})
async def delete_user(user: Id, request: Request) -> Response:
    """Remove every session that was opened for the user, or that holds a call made for it. Repeatable."""
    deleted = await parts_of(request).deleter.delete_user(user)
    return JSONResponse({"user": user, "deleted": msgspec.to_builtins(deleted)})
