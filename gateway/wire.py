"""What the dialects share on the wire: bodies, model names, messages, and clients that hang up."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from gateway.collaborators import Collaborators
from gateway.engine import drain
from gateway.render import Message
from rollout_queue.web.errors import ApiError

T = TypeVar("T")

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


def decode_body(body: bytes, kind: type[T]) -> T:
    """Raises ApiError 400 that names the field at fault."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        param = where.strip("`.") or None
        raise ApiError(400, f"{param}: {message}" if param else message, param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error


def pinned_version(gateway: Collaborators, model: str | None, policy: str | None) -> int | None:
    """The version that `policy@12` asks for. Raises ApiError 404 for a model that nobody serves."""
    settings = gateway.settings
    name, at, version = (model or settings.model_name).partition("@")
    if name != settings.model_name:
        if settings.strict_models:
            raise ApiError(404, f"no model {model!r}", param="model", code="model_not_found")
        at = ""  # harnesses hard-code names: any other is served by the policy
    if not at and policy is not None:
        name, at, version = policy.partition("@")
    if not at:
        return None
    if not (version.isascii() and version.isdigit() and len(version) < 19):
        raise ApiError(400, f"{model or policy!r}: a version is a number", param="model")
    if gateway.fleet.choose("", int(version)) is None:
        raise ApiError(404, f"no server serves version {version}", param="model", code="model_not_found")
    return int(version)


def check_messages(messages: list[Message]) -> None:
    """Raises ApiError 400 for what is no conversation, or holds what a text model cannot read."""
    if not messages:
        raise ApiError(400, "messages: give at least one", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.get("role") not in ROLES:
            raise ApiError(400, f"{where}.role: {message.get('role')!r} is no role", param=f"{where}.role")
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                _check_part(part, where)
        elif not (content is None or isinstance(content, str)):
            raise ApiError(400, f"{where}.content: neither text nor a list of parts", param=where)
        calls = message.get("tool_calls")
        if calls is not None and not (
            isinstance(calls, list)
            and all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls)
        ):
            raise ApiError(400, f"{where}.tool_calls: not a list of function calls", param=where)


def _check_part(part: Any, where: str) -> None:
    if isinstance(part, str):
        return
    if not isinstance(part, dict):
        raise ApiError(400, f"{where}.content: a part is neither text nor an object", param=where)
    if part.get("type", "text") not in TEXT_PARTS:
        raise ApiError(400, f"{where}.content: this model reads text, not {part.get('type')}", param=where)
    if not isinstance(part.get("text", ""), str):
        raise ApiError(400, f"{where}.content: the text of a part is not text", param=where)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, but stop it when the client hangs up. Raises ApiError 499 then, which nobody hears."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the client went away", type="invalid_request_error")
    finally:
        await drain([task, gone])


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
