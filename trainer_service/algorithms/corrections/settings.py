"""The settings, with defaults, of corrections and masks for tokens that another policy sampled."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from trainer_service.algorithms.tokens import Anchor

TIS_TOKEN_CAP = 2.0
TIS_SEQUENCE_CAP = 5.0
ICEPOP_LOW = 0.5
ICEPOP_HIGH = 5.0

GEOMETRIC_LOW = 0.99
GEOMETRIC_HIGH = 1.01
PRODUCT_LOW = 0.5
PRODUCT_HIGH = 2.0
OUTLIER_LOW = 1e-4
OUTLIER_HIGH = 100.0
M2PO_LIMIT = 0.04

Estimator = Literal["k1", "k2", "k3"]


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


class NoCorrection(Frozen):
    name: Literal["none"] = "none"


class TisToken(Frozen):
    """With `ppo` and a cap of 5, this is decoupled PPO in mode `clamp`."""

    name: Literal["tis_token"] = "tis_token"
    cap: Above0 = TIS_TOKEN_CAP
    normalise: bool = False
    """Divide the weights by their mean over the whole step."""


class TisSequence(Frozen):
    name: Literal["tis_sequence"] = "tis_sequence"
    cap: Above0 = TIS_SEQUENCE_CAP
    normalise: bool = False


class Icepop(Within):
    """With `ppo` and bounds of 0 and 5, this is decoupled PPO in mode `mask`."""

    name: Literal["icepop"] = "icepop"
    low: AtLeast0 = ICEPOP_LOW
    high: Above0 = ICEPOP_HIGH
    normalise: bool = False


Correction = Annotated[
    NoCorrection | TisToken | TisSequence | Icepop,
    Field(discriminator="name"),
    BeforeValidator(by_name),
]


class Geometric(Within):
    name: Literal["geometric"] = "geometric"
    low: AtLeast0 = GEOMETRIC_LOW
    high: Above0 = GEOMETRIC_HIGH


class Product(Within):
    name: Literal["product"] = "product"
    low: AtLeast0 = PRODUCT_LOW
    high: Above0 = PRODUCT_HIGH


class Outlier(Within):
    """Leaves out rows in which the ratio of any token is outside the bounds."""

    name: Literal["outlier"] = "outlier"
    low: AtLeast0 = OUTLIER_LOW
    high: Above0 = OUTLIER_HIGH


class Rejection(Frozen):
    """The rejection masks of verl (`rs_*`). For k1, `low` and `high` bound the ratio of engine to trainer.
    For k2 and k3, `upper` is the bound, in nats."""

    name: Literal["rejection"] = "rejection"
    level: Literal["token", "seq_sum", "seq_mean", "seq_max"] = "token"
    estimator: Estimator = "k3"
    low: Above0 | None = None
    high: Above0 | None = None
    upper: AtLeast0 | None = None

    @model_validator(mode="after")
    def _bounds_fit(self) -> "Rejection":
        if self.estimator == "k1":
            if self.level == "seq_max":
                raise ValueError(
                    "rejection: k1 has a sign, so its maximum is no measure of distance; "
                    "seq_max takes k2 or k3"
                )
            if self.low is None or self.high is None or self.upper is not None:
                raise ValueError("rejection: k1 is bounded by low and high")
            if not self.low <= 1 <= self.high:
                raise ValueError(f"rejection: [{self.low:g}, {self.high:g}] leaves out equal policies")
        elif self.upper is None or self.low is not None or self.high is not None:
            raise ValueError(f"rejection: {self.estimator} is bounded by upper alone")
        return self


class M2po(Frozen):
    """Leaves out the tokens with the largest squared log-ratios, until the mean of the rest is below `limit`
    nats²."""

    name: Literal["m2po"] = "m2po"
    limit: Above0 = M2PO_LIMIT


class Kpop(Frozen):
    """Leaves out tokens whose Bernoulli KL between trainer and engine exceeds `upper` nats."""

    name: Literal["kpop"] = "kpop"
    upper: Above0


class Opsm(Frozen):
    """Leaves out tokens with a negative advantage in rows whose mean log-probability has fallen by more than
    `delta` nats a token."""

    name: Literal["opsm"] = "opsm"
    delta: Above0
    anchor: Anchor = "prox"


Mask = Annotated[
    Geometric | Product | Outlier | Rejection | M2po | Kpop | Opsm,
    Field(discriminator="name"),
    BeforeValidator(by_name),
]
