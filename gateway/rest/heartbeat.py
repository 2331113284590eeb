"""`POST /sessions/{id}/heartbeat`: the agent is alive, though its tool runs longer than its session lives."""

import time

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.collaborators import collaborators
from gateway.rest.shapes import Beat
from gateway.sessions.belonging import refusal_of
from rollout_queue.contract.errors import SessionClosed
from rollout_queue.http.errors import ApiError

router = APIRouter(tags=["sessions"])


@router.post("/sessions/{session_id}/heartbeat", responses={200: {"model": Beat}})
async def beat(session_id: str, request: Request) -> Response:
    """The session expires as if a call had ended now. Its own key may say so; 409 once it has ended."""
    gateway = collaborators(request)
    caller = gateway.identities.caller(request.headers)
    head = await gateway.sessions.head(session_id, caller)
    if refusal := refusal_of(head):
        raise refusal
    gateway.admission.check_call(head.spec.owner)
    try:
        expires_at = await gateway.writer.heartbeat(session_id, time.time())
    except SessionClosed as error:  # it ended in this moment
        raise ApiError(409, str(error), code="session_finished") from error
    return JSONResponse({"session_id": session_id, "expires_at": max(expires_at, head.expires_at)})
