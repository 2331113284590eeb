"""The base of all messages between services: frozen, and checked both when made and when read.

sender ── ServiceMessage(...) ─▶ model_dump_json ── HTTP ──▶ ServiceMessage.read ── receiver

What the messages of all services have in common: ErrorReply, the body of every answer that is an error; Id,
which callers choose; and ModelCheck, what each service finds out about the model at the start.

trainer, rollout server, gateway ─ ModelCheck ─▶ log, status ─▶ `weir doctor`
"""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError


class MalformedMessage(ValueError):
    """A body is not the message that its reader expects; the text names the first field that is wrong."""


class ServiceMessage(BaseModel):
    """A JSON object that one service sends another.

    A reader ignores fields that it does not know, so that a newer sender may add some. A reader accepts a
    message that lacks a field with a default. A sender always writes such a field, so OpenAPI says that it is
    required.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", json_schema_serialization_defaults_required=True
    )

    @classmethod
    def read(cls, body: bytes) -> Self:
        """The message in a JSON body. Raises MalformedMessage."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise MalformedMessage(f"not a {cls.__name__}: {first_fault(error)}") from error


def first_fault(error: ValidationError) -> str:
    """The first field that is wrong and how, as `field: what is wrong`."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where or 'body'}: {first['msg']}"


QUOTED_CHARACTERS = 200
LARGEST = 2**53
"""Every JSON reader represents whole numbers below this one exactly."""


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


ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:@~=+-]{1,200}")
"""An id may stand in a URL path as it is. `.` and `..` are excluded, because paths give them a meaning."""


def _checked(value: str) -> str:
    if not ID.fullmatch(value):
        raise ValueError("an id is 1 to 200 of A-Z a-z 0-9 . _ : @ ~ = + - and neither . nor ..")
    return value


Id = Annotated[str, AfterValidator(_checked)]


TITLE = "the model, checked at the start"
Outcome = Literal["right", "differs", "refused", "unknown"]
"""`differs`: something is unusual, and served all the same in a way that is safe; the detail says which."""


class ModelCheck(ServiceMessage):
    """One row."""

    check: str
    outcome: Outcome
    detail: str

    @property
    def line(self) -> str:
        """The row as a line of a log."""
        return f"{TITLE}: {self.check}: {self.outcome}: {self.detail}"
