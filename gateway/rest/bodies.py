"""The base class of REST request bodies, which refuses unknown fields and converts no types."""

from pydantic import BaseModel, ConfigDict


class RestBody(BaseModel):
    """A request body, checked strictly."""

    # With a bound on strings, pydantic refuses a lone surrogate (half a UTF-16 pair), which cannot be stored.
    model_config = ConfigDict(extra="forbid", strict=True, str_min_length=0)
