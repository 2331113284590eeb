"""The base class of REST request bodies, which refuses unknown fields and converts no types."""

from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, model_validator

from gateway.dialects.fields.checks import check_metadata
from rollout_queue.foreign_json import check_values
from rollout_queue.http.bodies.json_routes import JsonRoute

MOST_FIELDS = 100
"""No object of a body has so many fields."""


class PromptRoute(JsonRoute):
    """A route whose body has token ids, and not much besides."""

    most_values = 2**20

    def check(self, body: bytes) -> None:
        super().check(body)
        check_values(body, JsonRoute.most_values, {b":": 1.0, b"[": 1.0, b"{": 1.0, b'"': 0.5})


class RestBody(BaseModel):
    """A request body, checked strictly."""

    # With a bound on strings, pydantic refuses a lone surrogate (half a UTF-16 pair), which cannot be stored.
    model_config = ConfigDict(extra="forbid", strict=True, str_min_length=0)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: Any) -> Any:
        if (
            isinstance(given, dict) and len(given) > MOST_FIELDS
        ):  # each unknown one would be an error of its own
            raise ValueError(f"it has more than {MOST_FIELDS} fields")
        return given


def _storable(value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    try:
        msgspec.msgpack.encode(value)
    except (ValueError, OverflowError, RecursionError) as error:  # 2**64, half a surrogate pair, deep nesting
        raise ValueError("it contains a value that cannot be stored") from error
    check_metadata(value, info.field_name or "metadata")
    return value


StoredMetadata = Annotated[dict[str, Any], AfterValidator(_storable)]
"""What a client notes of what it makes, within `MAX_METADATA_BYTES`."""
