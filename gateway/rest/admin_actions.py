"""Logs what operators and the trainer change. `GET /admin/actions` reads it.

What agents do (open, reward and end sessions) is no action, also where an agent has an admin key or the
gateway has no keys.

The other workers of the gateway read changed keys before the reply is sent.
"""

from collections.abc import Set
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.callers.identity import Caller
from gateway.errors import invalid
from gateway.operators.actions import READS, ActionLog, now_action
from gateway.parts import parts_of
from gateway.rest.shapes import ActionPage, ActionShape
from gateway.rest.workers import CHANGED_PATH
from rollout_queue.http.callers import Role
from rollout_queue.http.json_routes import JsonRoute

router = APIRouter(route_class=JsonRoute)

LOGGED: Set[Role] = {"admin", "trainer"}
"""Rollout servers that have a key of their own register by themselves."""
OPERATORS = ("/admin/", "/page/")
"""Where the paths of operators' requests begin. Elsewhere, only what is deleted is an action."""
ENTRY_ID = r"^[0-9]{1,20}(-[0-9]{1,20})?$"
MOST = 2**64
"""No part of an id in Redis has this number."""


class LogAdminActions:
    """ASGI middleware inside `JsonBodies`, which puts the caller into the scope's state."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller | None = scope.get("state", {}).get("caller")
        if scope["type"] != "http" or not _is_action(scope) or caller is None or caller.role not in LOGGED:
            await self._app(scope, receive, send)
            return
        status = 500  # if the route raises

        def changed() -> bool:
            return status >= 400 or not scope["state"].get("changes_nothing")

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            if message["type"] == "http.response.start" and changed():
                await scope["app"].state.siblings.ask(CHANGED_PATH)  # other workers know the keys, too
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            log: ActionLog = scope["app"].state.parts.actions
            host = (scope.get("client") or ("",))[0]
            request_id = scope["state"].get("request_id", "")
            if changed():
                await log.add(
                    now_action(caller.key, scope["method"], scope["path"], status, request_id, host)
                )


def _is_action(scope: Scope) -> bool:
    of_operators = scope["path"].startswith(OPERATORS)
    return scope["method"] == "DELETE" or (of_operators and scope["method"] not in READS)


@router.get("/actions")
async def list_actions(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[str | None, Query(pattern=ENTRY_ID)] = None,
) -> ActionPage:
    """The last actions, newest first. `before` continues a list: it is the id of the oldest action so far."""
    parts = [int(part) for part in (before or "").split("-") if part]
    if any(part >= MOST for part in parts):
        raise invalid("before", f"{before!r} is not the id of an action")
    if before is not None and not any(parts):
        return ActionPage(data=[])  # nothing is older
    found = await parts_of(request).actions.newest(limit, before)
    return ActionPage(
        data=[
            ActionShape(
                id=entry_id,
                at=each.at,
                key=each.key,
                method=each.method,
                path=each.path,
                status=each.status,
                request_id=each.request_id,
                client=each.client,
            )
            for entry_id, each in found
        ]
    )
