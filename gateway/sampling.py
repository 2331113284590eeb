"""Who decides how an answer is sampled: one owner per parameter, and a record of both wishes.

The engine's logprobs are of softmax(logits / temperature) before top-p and top-k, so only temperature
leaves them exact; `enforce` keeps training traffic there.
"""

from typing import Any

from rollout_queue.records import Sampling, SamplingPolicy

NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent with every request, so that no engine default decides in our place."""
PENALTIES = ("frequency_penalty", "presence_penalty")


def decide(policy: SamplingPolicy, asked: dict[str, Any], room: int, train: bool) -> Sampling:
    """The sampling of one call.

    `asked` holds what the caller sent and nothing else; `room` is how many tokens the context leaves.
    A session that is not trained keeps the caller's own parameters.
    """
    mode = policy.mode if train else "allow"
    used: dict[str, Any] = {"temperature": policy.temperature, "top_p": policy.top_p, **NEUTRAL}
    if mode != "enforce":
        used |= {name: value for name, value in asked.items() if name in ("temperature", "top_p")}
    if mode == "allow":
        used |= {name: asked[name] for name in PENALTIES if asked.get(name)}
    limits = [asked.get("max_tokens"), policy.max_tokens, room]
    used["max_tokens"] = min(limit for limit in limits if limit is not None)
    return Sampling(asked=asked, used=used)


def engine_parameters(sampling: Sampling, stop_ids: list[int], stop: list[str]) -> dict[str, Any]:
    """The same in SGLang's names."""
    parameters = {name: value for name, value in sampling.used.items() if name != "max_tokens"}
    parameters |= {
        "max_new_tokens": sampling.used["max_tokens"],
        "stop_token_ids": stop_ids,
        "skip_special_tokens": False,
    }
    if stop:
        parameters["stop"] = stop
    return parameters
