"""Makes a `Call` of token ids and sampling parameters, for clients that render their messages themselves.

It knows no wire shape, so every API that takes token ids can use it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gateway.errors import InvalidRequest
from gateway.generations.generation import Call
from gateway.language.render import ChatRenderer
from rollout_queue.contract.tokens import TokenIds

MAX_STOP_IDS = 256
"""Limit on the stop tokens of one call."""
MAX_SALT_CHARS = 256


class TokenParameters(NamedTuple):
    """How an answer to token ids is sampled."""

    asked: Mapping[str, Any] = {}
    """In OpenAI's names, and `min_tokens`, with values within their bounds; as in `Call.asked`."""
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    """Tokens that end the answer, beside those of the model."""
    ignore_eos: bool = False
    """No token ends the answer. The engine then knows no stop tokens at all."""
    cache_salt: str | None = None
    """Calls with different salts share no cached prefixes."""
    experts_from: int | None = None
    """The position of the first token whose routed experts are wanted; None if none are."""


def token_call(
    renderer: ChatRenderer, token_ids: Sequence[int], parameters: TokenParameters, param: str = "token_ids"
) -> Call:
    """The call. `param` is the name of the ids in the client's request.

    Raises InvalidRequest for ids that the model does not have or that do not fit into its context, and for
    parameters that contradict each other.
    """
    _check_prompt(renderer, token_ids, param)
    _check(renderer, parameters, len(token_ids))
    return Call(
        messages=(),
        asked=parameters.asked,
        stop=list(parameters.stop),
        stop_ids=tuple(dict.fromkeys(parameters.stop_ids)),
        ignore_eos=parameters.ignore_eos,
        cache_salt=parameters.cache_salt,
        experts_from=parameters.experts_from,
        prompt_ids=TokenIds(token_ids),
    )


def _check_prompt(renderer: ChatRenderer, token_ids: Sequence[int], param: str) -> None:
    if not token_ids:
        raise InvalidRequest(f"{param}: the prompt is empty", param=param)
    context, count = renderer.context_length, len(token_ids)
    if count >= context:
        message = f"{param}: the prompt has {count} tokens; the context holds {context}, the answer included"
        raise InvalidRequest(message, param=param, code="context_length_exceeded")
    _check_ids(renderer, token_ids, param)


def _check_ids(renderer: ChatRenderer, token_ids: Sequence[int], param: str) -> None:
    vocabulary = renderer.config.vocab_size
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocabulary):
        message = f"{param}: a token id lies outside the vocabulary of {vocabulary}"
        raise InvalidRequest(message, param=param, code="token_out_of_vocabulary")


def _check(renderer: ChatRenderer, parameters: TokenParameters, prompt_tokens: int) -> None:
    stop_ids, asked = parameters.stop_ids, parameters.asked
    if len(stop_ids) > MAX_STOP_IDS:
        raise InvalidRequest(f"stop_token_ids: at most {MAX_STOP_IDS}", param="stop_token_ids")
    _check_ids(renderer, stop_ids, "stop_token_ids")
    if parameters.ignore_eos and stop_ids:
        message = "ignore_eos: the engine then ignores stop_token_ids, too; send only one of them"
        raise InvalidRequest(message, param="ignore_eos")
    limit = asked.get("max_tokens")
    if limit is not None and asked.get("min_tokens", 0) > limit:
        raise InvalidRequest("min_tokens: more than max_tokens", param="min_tokens")
    salt = parameters.cache_salt
    if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARS:
        raise InvalidRequest(f"cache_salt: a text of 1 to {MAX_SALT_CHARS} characters", param="cache_salt")
    if parameters.experts_from is not None and not 0 <= parameters.experts_from < prompt_tokens:
        message = "routed_experts_prompt_start: a position in the prompt"
        raise InvalidRequest(message, param="routed_experts_prompt_start")
