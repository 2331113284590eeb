"""What can be set of the way from rewards to advantages, and the defaults.

raw reward ─ ShapingSettings ─▶ the reward that is compared ─ Advantage ─▶ advantage
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

EPS = 1e-6
"""Keeps a quotient by a standard deviation finite, where a group's rewards hardly differ."""
BATCH_EPS = 1e-5
WHITEN_EPS = 1e-8
"""The same for a variance."""
ZERO_VARIANCE = 1e-6
"""A group whose rewards span no more than this teaches nothing."""
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
    """Those without a parameter."""

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
    """How much each part of the reward counts, by its name."""
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
    """How much of an agent's baseline stays when it hears of another reward."""


class ReinforcePpBaseline(_Frozen):
    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    whiten: bool = True


class ReinforcePp(_Frozen):
    name: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Fraction = GAMMA
    """Per trained token; what tools and users say takes no time."""


class Gae(_Frozen):
    """`gae` steps from token to token, `turn_gae` from turn to turn."""

    name: Literal["gae", "turn_gae"] = "gae"
    gamma: Fraction = GAMMA
    lam: Fraction = LAMBDA
    whiten: bool = True
    """For the actor; the critic learns the returns as they are."""


def _by_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


Advantage = Annotated[
    Plain | Grpo | Liteppo | Gpg | Passk | Gdpo | Rae | ReinforcePpBaseline | ReinforcePp | Gae,
    Field(discriminator="name"),
    BeforeValidator(_by_name),
]
"""One of them, by its name; the name alone stands for it with its defaults."""

TOKEN_LEVEL = frozenset({"reinforce_pp", "gae", "turn_gae"})
"""Those that credit each token with what comes after it. All others give a rollout one advantage."""


class Overlong(_Frozen):
    max_len: int = Field(gt=0)
    """Tokens."""
    cache: int = Field(gt=0)
    """How many tokens before `max_len` the penalty begins."""
    factor: float = Field(OVERLONG_FACTOR, gt=0)

    @model_validator(mode="after")
    def _cache_fits(self) -> "Overlong":
        if self.cache > self.max_len:
            raise ValueError(f"overlong: a cache of {self.cache} does not fit into max_len, {self.max_len}")
        return self


class LengthPenalty(_Frozen):
    """How much of a group's mean reward its longest member loses, for each way of being long."""

    output_tokens: Fraction = 0.0
    input_tokens: Fraction = 0.0
    turns: Fraction = 0.0

    @model_validator(mode="after")
    def _something_counts(self) -> "LengthPenalty":
        if not (self.output_tokens or self.input_tokens or self.turns):
            raise ValueError("length_penalty: no length has a weight; leave it out to have no penalty")
        return self


class ShapingSettings(_Frozen):
    """What is done to rewards before they are compared."""

    truncated: Truncated = "mask"
    """A truncated rollout is neither compared nor trained, or gets 0, or keeps the reward that it has."""
    overlong: Overlong | None = None
    length_penalty: LengthPenalty | None = None
    turn_discount: Fraction | None = None
    """What a turn gets of the reward of the turn after it."""
    kl_in_reward: float = Field(0.0, ge=0)
    """What a token pays for each nat that it leaves the reference policy by."""


def contradiction(advantage: Advantage, shaping: ShapingSettings) -> str | None:
    """Why the two cannot be meant together; None where they can."""
    name = advantage.name
    if name not in TOKEN_LEVEL and shaping.kl_in_reward:
        return f"kl_in_reward rewards tokens, and {name} compares whole rollouts"
    if name not in TOKEN_LEVEL and shaping.turn_discount is not None:
        return f"turn_discount rewards turns, and {name} compares whole rollouts"
    if name == "gdpo" and (shaping.overlong or shaping.length_penalty):
        return "gdpo compares the parts of a reward, and a length penalty changes only their sum"
    return None
