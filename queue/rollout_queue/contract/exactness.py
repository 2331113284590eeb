"""Tells whether the recorded logprobs of an answer are those of the distribution that it was sampled from."""

from collections.abc import Mapping
from typing import Any

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


def inexact(used: Mapping[str, Any]) -> list[str]:
    """The used sampling parameters, each with its value, that make the recorded logprobs differ from those
    of the sampled distribution. At temperature 0 the engine takes the most likely token, and reports the
    logprob at temperature 1."""
    found = [name for name, value in WITHOUT_EFFECT.items() if used.get(name, value) != value]
    shown = [name if name == "logit_bias" else f"{name} {used[name]}" for name in found]
    return shown + (["temperature 0"] if used.get("temperature") == 0 else [])
