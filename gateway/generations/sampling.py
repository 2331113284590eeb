"""Who decides how an answer is sampled: one owner per parameter, and a record of both wishes.

The engine's logprobs are of softmax(logits / temperature) before top-p and top-k, so only temperature
leaves them exact; `enforce` keeps training traffic there.
"""

from typing import Any

from gateway.generations.generation import Call
from rollout_queue.contract.records import Sampling, SamplingPolicy

NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent with every request, so that no engine default decides in our place."""
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
PENALTIES = ("frequency_penalty", "presence_penalty", "logit_bias")
RENAMED = frozenset({"max_tokens", "seed", "constraint"})
"""What the engine calls otherwise."""


def decide(policy: SamplingPolicy, call: Call, room: int, train: bool, index: int = 0) -> Sampling:
    """The sampling of choice `index` of one call; `room` is how many tokens the context leaves.

    A session that is not trained keeps the caller's own parameters.
    """
    asked = call.asked
    mode = policy.mode if train else "allow"
    used: dict[str, Any] = {"temperature": policy.temperature, "top_p": policy.top_p, **NEUTRAL}
    if mode != "enforce":
        used |= {name: asked[name] for name in DEFAULTED if name in asked}
    if mode == "allow":
        used |= {name: asked[name] for name in PENALTIES if asked.get(name)}
    limits = [asked.get("max_tokens"), policy.max_tokens, room]
    used["max_tokens"] = min(limit for limit in limits if limit is not None)
    if call.constraint:
        used["constraint"] = asked["constraint"]
    if "seed" in asked:
        used["seed"] = asked["seed"] + index  # distinct samples, also on an engine that is deterministic
    return Sampling(asked=dict(asked), used=used)


def engine_parameters(sampling: Sampling, stop_ids: list[int], call: Call) -> dict[str, Any]:
    """The same in SGLang's names."""
    parameters = {name: value for name, value in sampling.used.items() if name not in RENAMED}
    parameters |= {
        "max_new_tokens": sampling.used["max_tokens"],
        "stop_token_ids": stop_ids,
        "skip_special_tokens": False,
        **call.constraint,
    }
    if "seed" in sampling.used:
        parameters["sampling_seed"] = sampling.used["seed"]
    if call.stop:
        parameters["stop"] = list(call.stop)
    return parameters
