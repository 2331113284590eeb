"""All routes of the Tinker API, below `/api/v1`, and `DELETE /admin/users/{user}/data`, which deletes all
data of a user, of this API as well. Later calls for this user are refused.
"""

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from gateway.parts import parts_of
from gateway.rest.access import admins_only
from gateway.rest.shapes import DeletedUserShape
from gateway.tinker import checkpoints, futures, model_commands, run_listing, samplers, service
from gateway.tinker.door import TinkerDoor
from rollout_queue.protocol.message import Id

api = APIRouter(prefix="/api/v1")
for routes in (service, model_commands, samplers, futures, run_listing, checkpoints):
    api.include_router(routes.router)
router = APIRouter()


@router.delete(
    "/admin/users/{user}/data",
    tags=["admin"],
    dependencies=[Depends(admins_only)],
    responses={200: {"model": DeletedUserShape}},
)
async def delete_user(user: Id, request: Request) -> Response:
    """Remove each session that was opened for the user, or has a call for the user, and each client session
    of the Tinker API that names the user. Repeats are allowed."""
    deleted = await parts_of(request).deleter.delete_user(user)
    door: TinkerDoor = request.app.state.tinker
    found = msgspec.to_builtins(deleted) | {"client_sessions": await door.removal.delete_user(user)}
    return JSONResponse({"user": user, "deleted": found})


router.include_router(api)
