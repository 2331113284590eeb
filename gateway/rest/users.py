"""`DELETE /admin/users/{user}/data`: all of one user goes, and nothing more is taken for that name."""

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from gateway.collaborators import collaborators
from gateway.rest.admin import admins_only
from gateway.rest.shapes import DeletedUser
from rollout_queue.protocol.ids import Id

router = APIRouter(prefix="/admin/users", tags=["admin"], dependencies=[Depends(admins_only)])


@router.delete("/{user}/data", responses={200: {"model": DeletedUser}})
async def delete_user(user: Id, request: Request) -> Response:
    """Remove every session that was opened for the user, or that holds a call made for it. Repeatable."""
    deleted = await collaborators(request).deleter.delete_user(user)
    return JSONResponse({"user": user, "deleted": msgspec.to_builtins(deleted)})
