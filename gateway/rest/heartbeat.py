"""`POST /sessions/{id}/heartbeat`: an agent postpones its session's expiry while it runs a long tool."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.errors import StateConflict
from gateway.parts import parts_of
from gateway.rest.access import caller_in
from gateway.rest.shapes import HeartbeatReply
from gateway.sessions.resolution import refusal_of
from rollout_queue import clock
from rollout_queue.contract.errors import SessionClosed

router = APIRouter(tags=["sessions"])


@router.post("/sessions/{session_id}/heartbeat", responses={200: {"model": HeartbeatReply}})
async def extend_session(session_id: str, request: Request) -> Response:
    """Let the session expire `ttl_s` from now. Its session key suffices; 409 once the session has ended."""
    gateway = parts_of(request)
    caller = caller_in(request.scope)
    head = await gateway.sessions.head(session_id, caller)
    if refusal := refusal_of(head):
        raise refusal
    gateway.admission.check_call(head.spec.owner)
    try:
        expires_at = await gateway.writer.heartbeat(head.spec.session_id, clock.now())
    except SessionClosed as error:  # it ended since it was read
        raise StateConflict(str(error), code="session_finished") from error
    return JSONResponse({"session_id": session_id, "expires_at": max(expires_at, head.expires_at)})
