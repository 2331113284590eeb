"""What the choices between rewards and a loss have in common: advantages, masks, corrections, losses.

A choice is a class. Its fields are its settings, `name` tells which choice is meant, and its method is its
formula. A union of such classes is the list of the choices; a name alone stands for its defaults.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Within(Frozen):
    """Ratios from `low` to `high` are kept. The ratio 1, of equal policies, must be among them."""

    low: AtLeast0
    high: Above0

    @model_validator(mode="after")
    def _contains_1(self) -> "Within":
        if not self.low <= 1 <= self.high:
            raise ValueError(f"[{self.low:g}, {self.high:g}] leaves out 1, the ratio of equal policies")
        return self


def by_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value
