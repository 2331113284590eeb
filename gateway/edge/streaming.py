"""The headers of a reply, and the text of the tokens that a stream sends."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.dialects.fields.unknown import ignored_header
from gateway.generations.generation import Generation
from gateway.language.answers.begun_answer import BegunAnswerStream
from gateway.language.answers.deltas import AnswerStream, RawTextStream
from gateway.language.answers.stop_strings import StoppedStream
from gateway.parts import GatewayParts
from rollout_queue.contract.tokens import TokenIds

NEAR = 0.8
"""The share of the trainer's bound of a row from which on replies have the header `x-weir-row-tokens`."""
MAX_HEADER_CHARS = 2048
"""aiohttp refuses a header over 8 KiB, Node headers over 16 KiB in total."""


Stream = AnswerStream | RawTextStream | BegunAnswerStream | StoppedStream


def answer_stream(gateway: GatewayParts, generation: Generation) -> Stream:
    stream, stops = _whole_stream(gateway, generation), generation.call.stop
    return StoppedStream(stream, gateway.renderer.tokenizer, stops) if stops else stream


def _whole_stream(
    gateway: GatewayParts, generation: Generation
) -> AnswerStream | RawTextStream | BegunAnswerStream:
    """The deltas of all tokens, those of a stop string included."""
    call = generation.call
    if call.prompt_ids is not None:
        return RawTextStream(gateway.renderer)
    prompt_ids, begun = generation.prompt.prompt_ids, generation.prompt.begun
    asked = TokenIds(prompt_ids[:-begun]) if begun else prompt_ids
    renderer = gateway.renderer.variant(call.thinking)
    whole = AnswerStream(renderer, call.tools, generation.turn_id, asked)
    return BegunAnswerStream(whole, prompt_ids[-begun:], call.begun) if begun else whole


def opening_headers(generations: Sequence[Generation]) -> dict[str, str] | None:
    """The headers of a stream that begins with a heartbeat; None until an engine works on an answer."""
    return reply_headers(generations) if any(each.at_engine for each in generations) else None


def reply_headers(generations: Sequence[Generation]) -> dict[str, str]:
    """Headers that name the session, the turns, the policy version and the sampling of the answers, and how
    near the prompt, with the answer so far, is to the trainer's bound of a row."""
    first = generations[0]
    tokens = max(len(each.prompt.prompt_ids) + len(each.ids) for each in generations)
    near = first.max_row_tokens is not None and tokens >= NEAR * first.max_row_tokens
    return {
        **({"x-weir-row-tokens": f"{tokens} of {first.max_row_tokens}"} if near else {}),
        "x-weir-session-id": first.head.spec.shown_id,
        "x-weir-turn-id": ",".join([generation.turn_id for generation in generations]),
        "x-weir-policy-version": str(first.versions[0].version) if first.versions else "",
        "x-weir-sampling": _header_json(first.sampling.used),
        "x-weir-sampling-asked": _header_json(first.sampling.asked),
        **ignored_header(first.call.ignored_fields),
    }


def _header_json(parameters: Mapping[str, Any]) -> str:
    """The parameters as JSON. A long `logit_bias` becomes null, because clients refuse long headers."""
    text = msgspec.json.encode(parameters).decode()
    if len(text) <= MAX_HEADER_CHARS:
        return text
    return msgspec.json.encode({**parameters, "logit_bias": None}).decode()
