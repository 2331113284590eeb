"""What the bodies of REST requests share: no unknown field, no guessed type."""

from pydantic import BaseModel, ConfigDict


class RestBody(BaseModel):
    """A request body, checked strictly."""

    # With any bound on strings, pydantic refuses half a surrogate pair, which nothing can store.
    model_config = ConfigDict(extra="forbid", strict=True, str_min_length=0)
