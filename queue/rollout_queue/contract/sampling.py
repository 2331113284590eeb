"""What a session says of sampling, and whether recorded logprobs are those of the sampled distribution."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

SamplingMode = Literal["exact", "enforce", "default", "allow"]

WITHOUT_EFFECT: Mapping[str, Any] = {
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "min_tokens": 0,
}
"""The values of sampling parameters with which the engine samples from softmax(logits / temperature)."""

GREEDY_BELOW = 1e-6
"""At a lower temperature SGLang takes the most likely token, and reports the logprobs of temperature 1."""


def is_greedy(temperature: float) -> bool:
    return temperature < GREEDY_BELOW


def temperature_of_logprobs(used: Mapping[str, Any]) -> float:
    """The temperature at which the engine computed the recorded logprobs."""
    temperature = float(used.get("temperature", 1.0))
    return 1.0 if is_greedy(temperature) else temperature


def inexact(used: Mapping[str, Any]) -> list[str]:
    """The used sampling parameters, each with its value, that make the recorded logprobs differ from those
    of the sampled distribution."""
    found = [name for name, value in WITHOUT_EFFECT.items() if used.get(name, value) != value]
    shown = [name if name == "logit_bias" else f"{name} {used[name]}" for name in found]
    temperature = used.get("temperature", 1.0)
    return shown + ([f"temperature {temperature:g}"] if is_greedy(temperature) else [])


class SamplingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of a session's calls. `named_mode` says when they apply."""

    mode: Literal["enforce", "default", "allow"] = "enforce"
    """`enforce`: always. `default`: unless the call gives its own. `allow`: as `default`, and the call may
    give penalties, too. In every mode, the smaller `max_tokens` of the session and the call applies."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    own_temperature: bool = False
    """With `enforce`: but for a call's temperature at which logprobs are exact. Together they are the mode
    `exact`, in a form that earlier releases of this schema read."""

    @classmethod
    def of(cls, mode: SamplingMode, **parameters: Any) -> "SamplingPolicy":
        if mode == "exact":
            return cls(mode="enforce", own_temperature=True, **parameters)
        return cls(mode=mode, **parameters)

    @property
    def named_mode(self) -> SamplingMode:
        """The mode, by the name that users know."""
        return "exact" if self.own_temperature else self.mode
