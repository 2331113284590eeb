"""Commands that are refused when they arrive. Their numbers are used up, so the log gets them too."""

import hashlib
from contextlib import suppress

from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import GatewayError, InvalidRequest, ObjectNotFound
from gateway.rest.tinker_api.door import door_of
from rollout_queue.commands.command import Refused
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.foreign_json import read_json
from rollout_queue.http.bodies.json_routes import Handler, JsonRoute

LARGEST = 2**31


class CommandRoute(JsonRoute):
    """A route whose body has a model and the number of a command."""

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()

        async def booked(request: Request) -> Response:
            try:
                return await handler(request)
            except (RequestValidationError, InvalidRequest, ObjectNotFound) as error:
                with suppress(GatewayError, StorageUnavailable, ValueError, KeyError, TypeError):
                    await _book(request, _sentence(error))
                raise

        return booked


async def _book(request: Request, why: str) -> None:
    """Put a refused command into the log, if the body has a model of the caller and a number."""
    body = await request.body()
    given = read_json(body)
    model_id, number = given["model_id"], given["seq_id"]
    if not isinstance(model_id, str) or type(number) is not int or not 0 <= number < LARGEST:
        return
    door, caller = door_of(request)
    await door.store.model(model_id, caller)
    await door.submit(model_id, number, Refused(why), hashlib.sha256(body).hexdigest()[:32])


def _sentence(error: RequestValidationError | GatewayError) -> str:
    if isinstance(error, GatewayError):
        return error.message
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'][1:])}: {first['msg']}"
