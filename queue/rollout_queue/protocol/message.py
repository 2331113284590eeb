"""The base of all messages between services: frozen, and checked both when made and when read.

sender ── ServiceMessage(...) ─▶ model_dump_json ── HTTP ──▶ ServiceMessage.read ── receiver
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError


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
