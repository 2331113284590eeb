"""The settings of reward shaping and of advantages, with their defaults.

raw reward ─ ShapingSettings ─▶ the reward that is compared ─ Advantage ─▶ advantage
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

EPS = 1e-6
"""Added to a standard deviation before a division by it."""
BATCH_EPS = 1e-5
"""Added to the standard deviation of the whole step before a division by it."""
WHITEN_EPS = 1e-8
"""Added to a variance before its square root is taken."""
ZERO_VARIANCE = 1e-6
"""A group whose rewards differ by at most this has no learning signal."""
GAMMA = 1.0
LAMBDA = 1.0
DECAY = 0.95
VALUE_CLIP = 0.2
OVERLONG_FACTOR = 1.0

Truncated = Literal["mask", "zero", "keep"]

Epsilon = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Plain(_Frozen):
    """The estimators without a parameter."""

    name: Literal["drgrpo", "rloo", "opo", "maxrl"] = "drgrpo"


class Grpo(_Frozen):
    name: Literal["grpo_ddof1", "grpo_ddof0"] = "grpo_ddof1"
    eps: Epsilon = EPS

    @property
    def ddof(self) -> int:
        return int(self.name == "grpo_ddof1")


class Liteppo(_Frozen):
    name: Literal["liteppo"] = "liteppo"
    eps: Epsilon = BATCH_EPS


class Gpg(_Frozen):
    name: Literal["gpg"] = "gpg"
    f_norm: float = Field(1.0, gt=0)


class Passk(_Frozen):
    name: Literal["passk"] = "passk"
    eps: Epsilon = EPS


class Gdpo(_Frozen):
    name: Literal["gdpo"] = "gdpo"
    weights: dict[str, float]
    """The weight of each part of the reward, by name."""
    eps: Epsilon = EPS
    whiten: bool = True

    @model_validator(mode="after")
    def _something_counts(self) -> "Gdpo":
        if not any(self.weights.values()):
            raise ValueError("gdpo: no part of the reward has a weight, so nothing would be learned")
        return self


class Rae(_Frozen):
    name: Literal["rae"] = "rae"
    decay: float = Field(DECAY, ge=0, lt=1)
    """The weight of an agent's old baseline in the new one; the new reward has the weight 1 - decay."""


class ReinforcePpBaseline(_Frozen):
    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    whiten: bool = True


class ReinforcePp(_Frozen):
    name: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Fraction = GAMMA
    """Discount per trained token; tokens of tools and users do not count."""


class Gae(_Frozen):
    """`gae` discounts from token to token, `turn_gae` from turn to turn."""

    name: Literal["gae", "turn_gae"] = "gae"
    gamma: Fraction = GAMMA
    lam: Fraction = LAMBDA
    whiten: bool = True
    """Whitens the actor's advantages; the critic's returns are never whitened."""


def _by_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


Advantage = Annotated[
    Plain | Grpo | Liteppo | Gpg | Passk | Gdpo | Rae | ReinforcePpBaseline | ReinforcePp | Gae,
    Field(discriminator="name"),
    BeforeValidator(_by_name),
]
"""One estimator, by its `name`; a name alone stands for the estimator with its defaults."""

TOKEN_LEVEL = frozenset({"reinforce_pp", "gae", "turn_gae"})
"""The estimators that give each token its own advantage. All others give one to each rollout."""


class Overlong(_Frozen):
    max_len: int = Field(gt=0)
    """The length, in trained tokens, at which the penalty is full."""
    cache: int = Field(gt=0)
    """The penalty begins this many tokens before `max_len`."""
    factor: float = Field(OVERLONG_FACTOR, gt=0)
    """The full penalty, in units of the reward."""

    @model_validator(mode="after")
    def _cache_fits(self) -> "Overlong":
        if self.cache > self.max_len:
            raise ValueError(f"overlong: a cache of {self.cache} does not fit into max_len, {self.max_len}")
        return self


class LengthPenalty(_Frozen):
    """The share of its group's mean reward that the longest member loses, for each measure of length."""

    output_tokens: Fraction = 0.0
    input_tokens: Fraction = 0.0
    turns: Fraction = 0.0

    @model_validator(mode="after")
    def _something_counts(self) -> "LengthPenalty":
        if not (self.output_tokens or self.input_tokens or self.turns):
            raise ValueError("length_penalty: no length has a weight; leave it out to have no penalty")
        return self


class ShapingSettings(_Frozen):
    """How rewards change before they are compared."""

    truncated: Truncated = "mask"
    """mask: truncated rollouts are neither compared nor trained; zero: their reward becomes 0; keep: their
    reward does not change."""
    overlong: Overlong | None = None
    length_penalty: LengthPenalty | None = None
    turn_discount: Fraction | None = None
    """A turn's return is its own reward plus this factor times the return of the next turn."""
    kl_in_reward: float = Field(0.0, ge=0)
    """Each token's reward is reduced by this factor times lp - lp_ref, in nats. lp is the token's
    log-probability before the step, and lp_ref its log-probability under the reference policy."""


def contradiction(advantage: Advantage, shaping: ShapingSettings) -> str | None:
    """The reason why the two settings exclude each other; None if they do not."""
    name = advantage.name
    if name not in TOKEN_LEVEL and shaping.kl_in_reward:
        return f"kl_in_reward rewards tokens, and {name} compares whole rollouts"
    if name not in TOKEN_LEVEL and shaping.turn_discount is not None:
        return f"turn_discount rewards turns, and {name} compares whole rollouts"
    if name == "gdpo" and (shaping.overlong or shaping.length_penalty):
        return "gdpo compares the parts of a reward, and a length penalty changes only their sum"
    return None
