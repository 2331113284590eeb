"""Decides the sampling parameters of an answer, and records both those requested and those used.

The engine's logprobs are of softmax(logits / temperature), before top-p and top-k. They are exact for the
sampled distribution only if nothing but a temperature above 0 changes it. So mode `exact` takes this
temperature and `max_tokens` from a call, and ignores its other parameters; `enforce` ignores the temperature,
too. Both ignore a `seed`: a harness that always sends the same would have every session of a group sample the
same answer.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import UNSET

from gateway.fleet.generate_request import SamplingParameters
from gateway.generations.generation import Call
from rollout_queue.contract.records import Sampling
from rollout_queue.contract.sampling import WITHOUT_EFFECT, SamplingMode, SamplingPolicy, is_greedy

NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Values without effect. They are sent where no other value applies, so that no engine's default does."""
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
PENALTIES = ("frequency_penalty", "presence_penalty", "logit_bias", "min_tokens")
"""Parameters that change logits. `min_tokens` forbids the tokens that end an answer, until it is so long."""
COMPARED = frozenset((*DEFAULTED, *PENALTIES))
"""Parameters of a call that may be used with another value, or not at all."""
RENAMED = frozenset({"max_tokens", "min_tokens", "seed", "constraint", "thinking", "why"})
"""Parameters that have another name at the engine, or change the prompt and not the sampling, and words."""
REASONS: Mapping[SamplingMode, str] = {
    "exact": "would make the logprobs inexact of a trained answer (sampling.mode exact)",
    "enforce": "the session's apply to a trained answer (sampling.mode enforce)",
    "default": "no penalty applies to a trained answer (sampling.mode default)",
    "allow": "the answer has no more tokens",
}
"""Why a parameter of a call is not used, or only in part."""


def decide(policy: SamplingPolicy, call: Call, room: int, train: bool, index: int = 0) -> Sampling:
    """The sampling of choice `index` of one call; `room` is the number of tokens left in the context.

    If `train` is false, the answer is an evaluation, and the caller's parameters apply.
    """
    asked = call.asked
    mode = policy.named_mode if train else "allow"
    used: dict[str, Any] = {"temperature": policy.temperature, "top_p": policy.top_p, **NEUTRAL}
    if mode in ("default", "allow"):
        used |= {name: asked[name] for name in DEFAULTED if name in asked}
    elif mode == "exact" and "temperature" in asked and not is_greedy(asked["temperature"]):
        used["temperature"] = asked["temperature"]
    if mode == "allow":
        used |= {name: asked[name] for name in PENALTIES if asked.get(name)}
    limits = [asked.get("max_tokens"), policy.max_tokens, room]
    used["max_tokens"] = min(limit for limit in limits if limit is not None)
    if "min_tokens" in used:
        used["min_tokens"] = min(used["min_tokens"], used["max_tokens"])
    if call.ignore_eos:
        used["ignore_eos"] = True
    if call.structural_tag is not None:
        used["constraint"] = asked["constraint"]
    if call.thinking:
        used["thinking"] = dict(call.thinking)
    if "seed" in asked and mode in ("default", "allow"):
        used["seed"] = asked["seed"] + index  # with equal seeds, all choices would be equal
    if why := "; ".join(_differences(policy, mode, asked, used)):
        used["why"] = why
    return Sampling(asked=dict(asked), used=used | _lawful(used))


def _lawful(used: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the engine takes, in place of those that only other servers know."""
    made: dict[str, Any] = {}
    if used["top_k"] == 0:  # all, for vLLM
        made["top_k"] = -1
    if used["top_p"] == 0:  # the most likely token only
        made |= {"top_p": 1.0, "top_k": 1}
    if is_greedy(used["temperature"]):
        made["temperature"] = 0.0
    return made


def _differences(
    policy: SamplingPolicy, mode: SamplingMode, asked: Mapping[str, Any], used: Mapping[str, Any]
) -> Iterator[str]:
    """What the call asked for and did not get, and why."""
    unused = [
        name if name == "logit_bias" else f"{name} {asked[name]:g}"
        for name in asked
        if name in COMPARED and used.get(name, WITHOUT_EFFECT.get(name)) != asked[name]
    ]
    if unused:
        yield f"{', '.join(unused)}: {REASONS[mode]}"
    if "seed" in asked and "seed" not in used:
        yield "seed: a group would sample one answer"
    if left_out := asked.get("constraint_left_out"):
        yield f"{', '.join(left_out)}: the engine would take too long to compile them into its grammar"
    if (most := asked.get("max_tokens", 0)) > (limit := used["max_tokens"]):
        of_session = limit == policy.max_tokens
        yield f"max_tokens {most}: the {'session allows' if of_session else 'context has room for'} {limit}"


def engine_parameters(
    sampling: Sampling, stop_ids: list[int], call: Call, stream_interval: int
) -> SamplingParameters:
    """The parameters under the engine's names."""
    same_name = {name: value for name, value in sampling.used.items() if name not in RENAMED}
    return SamplingParameters(
        **same_name,
        max_new_tokens=sampling.used["max_tokens"],
        # With `ignore_eos`, SGLang ends an answer at no stop token.
        stop_token_ids=[] if call.ignore_eos else [*dict.fromkeys((*stop_ids, *call.stop_ids))],
        min_new_tokens=sampling.used.get("min_tokens", UNSET),
        sampling_seed=sampling.used.get("seed", UNSET),
        stop=list(call.stop) or UNSET,
        structural_tag=UNSET if call.structural_tag is None else call.structural_tag,
        stream_interval=stream_interval,
    )
