"""The body of every answer that is an error."""

from rollout_queue.protocol.message import MalformedMessage, ServiceMessage

QUOTED_CHARACTERS = 200


class ErrorDetail(ServiceMessage):
    """What went wrong: `type` follows from the status, `param` names the field at fault."""

    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None


class ErrorReply(ServiceMessage):
    """An answer that is an error."""

    error: ErrorDetail


def error_message(body: bytes) -> str:
    """The message of an error reply. Of any other body, such as a proxy's page, the beginning."""
    try:
        return ErrorReply.read(body).error.message
    except MalformedMessage:
        return body.decode(errors="replace")[:QUOTED_CHARACTERS]


def error_code(body: bytes) -> str | None:
    """The code of an error reply; None if it has none."""
    try:
        return ErrorReply.read(body).error.code
    except MalformedMessage:
        return None
