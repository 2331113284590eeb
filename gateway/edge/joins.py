"""Lets a retry join a call that another worker of this gateway serves.

retry ──▶ worker 1 ── which worker has the call? ──▶ every other worker
              └────── join ──▶ worker 0, which serves the call and writes the whole answer a second time
"""

import logging

import httpx
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.counters import CallFigures
from gateway.edge.calls import CallKey, InFlightCalls
from gateway.edge.errors import ANSWERABLE, AnswerableError, api_error
from gateway.edge.reply import Reply
from gateway.edge.request import DisconnectWatch
from rollout_queue.http.errors import ApiError
from rollout_queue.http.worker_processes import ASK_S, HUNG_S, Siblings

logger = logging.getLogger(__name__)

HAVE_PATH, JOIN_PATH = "/calls/have", "/calls/join/"
ERROR_HEADER = "x-weir-error"
"""Marks an answer that is a `JoinedError`."""
OF_CONNECTION = frozenset({b"transfer-encoding", b"connection", b"keep-alive"})


class JoinQuestion(msgspec.Struct, frozen=True):
    """Which call a retry repeats, and the number of this attempt."""

    key: CallKey
    attempt: int


class JoinedError(msgspec.Struct, frozen=True):
    """The error that ended a call before its answer began."""

    status: int
    message: str
    type: str
    param: str | None
    code: str | None
    headers: dict[str, str]


_questions = msgspec.json.Decoder(JoinQuestion)
_errors = msgspec.json.Decoder(JoinedError)


class Joins:
    """Asks the other workers for the calls that retries repeat."""

    def __init__(self, siblings: Siblings) -> None:
        self._siblings = siblings

    async def answered(self, key: CallKey, attempt: int, reply: Reply) -> bool:
        """Write another worker's answer to the call; False if no other worker serves it.

        Raises ApiError if the call ended with an error. A marked retry waits for a worker that stands still,
        because the call would be sampled twice. If the worker dies before the answer begins, the result is
        False, and if it dies later, the stream is cut.
        """
        if not self._siblings.numbers:
            return False
        question = msgspec.json.encode(JoinQuestion(key, attempt))
        within_s = HUNG_S if attempt else ASK_S
        for number in await self._siblings.ask(HAVE_PATH, question, within_s):
            try:
                async with self._siblings.stream(number, JOIN_PATH, question) as answer:
                    if answer.status_code != 204:
                        await _relay(answer, reply)
                        return True
            except httpx.TransportError as error:
                logger.warning("worker %d ended during a call that a retry joined: %r", number, error)
                if reply.begun:
                    return True  # the server cuts the connection, because the answer is not complete
        return False


async def _relay(answer: httpx.Response, reply: Reply) -> None:
    if ERROR_HEADER in answer.headers:
        error = _errors.decode(await answer.aread())
        raise ApiError(
            error.status,
            error.message,
            type=error.type,
            param=error.param,
            code=error.code,
            headers=error.headers,
        )
    headers = [(name.lower(), value) for name, value in answer.headers.raw]
    kept = [header for header in headers if header[0] not in OF_CONNECTION]
    await reply.repeat({"type": "http.response.start", "status": answer.status_code, "headers": kept})
    async for chunk in answer.aiter_raw():
        await reply.repeat({"type": "http.response.body", "body": chunk, "more_body": True})
    await reply.repeat({"type": "http.response.body", "body": b""})


class JoinableCalls:
    """The other side: serves the calls of this worker to retries that other workers received."""

    def __init__(self, calls: InFlightCalls) -> None:
        self._calls = calls

    async def have(self, request: Request) -> Response:
        """200 if this worker serves the call, else 204."""
        question = _questions.decode(await request.body())
        found = self._calls.find(question.key, question.attempt)
        return Response(status_code=204 if found is None else 200)

    async def join(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The call's whole answer; 204 if it has just ended."""
        question = _questions.decode(await Request(scope, receive).body())
        call = self._calls.join(question.key, question.attempt)
        if call is None:
            await Response(status_code=204)(scope, receive, send)
            return
        uncounted = CallFigures("joined")  # the worker that has the client counts the answer
        reply = Reply(send, "", uncounted)
        try:
            with DisconnectWatch(receive):
                await call.follow(reply)
        except ANSWERABLE as error:
            if not reply.begun:
                await _error_response(error)(scope, receive, send)
        finally:
            reply.stop_heartbeat()


def _error_response(error: AnswerableError) -> Response:
    found = api_error(error)
    joined = JoinedError(found.status, found.message, found.type, found.param, found.code, found.headers)
    return Response(msgspec.json.encode(joined), found.status, {ERROR_HEADER: "1"})
