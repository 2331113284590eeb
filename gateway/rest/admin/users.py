"""`DELETE /admin/users/{user}/data`: deletes all data of a user. Later calls for this user are refused."""

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from gateway.parts import parts_of
from gateway.rest.access import admins_only
from gateway.rest.shapes import DeletedUserShape
from gateway.rest.tinker_api.door import TinkerDoor
from rollout_queue.protocol.ids import Id

router = APIRouter(prefix="/admin/users", tags=["admin"], dependencies=[Depends(admins_only)])


@router.delete("/{user}/data", responses={200: {"model": DeletedUserShape}})
async def delete_user(user: Id, request: Request) -> Response:
    """Remove each session that was opened for the user, or has a call for the user, and each client session
    of the Tinker API that names the user. Repeats are allowed."""
    deleted = await parts_of(request).deleter.delete_user(user)
    door: TinkerDoor = request.app.state.tinker
    told = msgspec.to_builtins(deleted) | {"client_sessions": await door.removal.delete_user(user)}
    return JSONResponse({"user": user, "deleted": told})
