"""`/v1/completions`: prompts without a chat template, as text or as token ids, plain and streaming."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.collaborators import Collaborators
from gateway.dialects.base import Ask
from gateway.dialects.completions_wire import CompletionsTelling
from gateway.dialects.wire import StreamOptions, Wishes, check_sampling, decode_body, sampling_of, stops
from gateway.edge.request import Arrival
from gateway.generations.generation import Call
from gateway.sessions.identity import Caller
from gateway.sessions.user_names import user_named
from rollout_queue.contract.tokens import TokenIds
from rollout_queue.http.errors import ApiError

MAX_PROMPTS = 128


class CompletionRequest(Wishes, kw_only=True):
    """The fields of OpenAI's contract that change what is done; others are tolerated."""

    prompt: str | list[str | int | list[int]] | None = None
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    best_of: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    return_token_ids: bool | None = False


class Completions:
    """The dialect of `/v1/completions`."""

    prefix = "cmpl-"

    async def read(self, gateway: Collaborators, caller: Caller, arrival: Arrival) -> Ask:
        body = decode_body(arrival.body, CompletionRequest)
        check(body)
        asked = sampling_of(body, gateway.renderer.config.vocab_size)
        if body.max_tokens is not None:
            asked["max_tokens"] = body.max_tokens
        prompts, encode = prompts_of(body), gateway.renderer.tokenizer.encode
        if arrival.heavy:
            ids = await asyncio.to_thread(_ids_of, encode, prompts)
        else:
            ids = _ids_of(encode, prompts)
        calls = [
            Call(
                messages=(),
                asked=asked,
                stop=stops(body.stop),
                stream=bool(body.stream),
                top_logprobs=body.logprobs or 0,
                prompt_ids=prompt_ids,
                user=user_named(body.user),
            )
            for prompt_ids in ids
        ]
        return Ask(
            calls=calls,
            telling=CompletionsTelling(gateway.renderer, body, body.model or gateway.settings.model_name),
            n=body.n or 1,
            stream=bool(body.stream),
            model=body.model,
            metadata=body.metadata,
        )

    def error(self, error: ApiError) -> bytes:
        return msgspec.json.encode(error.body)


def check(body: CompletionRequest) -> None:
    """Raises ApiError 400 for values outside the contract, or that this gateway does not serve."""
    check_sampling(body)
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, "best_of: every sample is answered, so it has to equal n", param="best_of")
    if body.suffix:
        raise ApiError(400, "suffix: this model continues text, it does not fill in", param="suffix")
    if body.logprobs is not None and not 0 <= body.logprobs <= 20:
        raise ApiError(400, f"logprobs: {body.logprobs} is not within 0 and 20", param="logprobs")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo with logprobs: only sampled tokens have logprobs here", param="echo")


def prompts_of(body: CompletionRequest) -> list[str] | list[list[int]]:
    """The prompts, one or several. Raises ApiError 400 where there is none, or an id is no int32."""
    prompt = body.prompt
    if prompt is None or prompt == [] or prompt == "":
        raise ApiError(400, "prompt: give text or token ids", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    prompts: list[Any] = [prompt] if isinstance(prompt[0], int) else prompt
    if len(prompts) * (body.n or 1) > MAX_PROMPTS:
        raise ApiError(400, f"prompt: at most {MAX_PROMPTS} answers in one call", param="prompt")
    for each in prompts:
        if not isinstance(each, str | list) or (isinstance(each, list) and not all(map(_is_id, each))):
            raise ApiError(400, "prompt: text, token ids, or a list of either", param="prompt")
    return prompts


def _ids_of(encode: Callable[[str], list[int]], prompts: Sequence[str | list[int]]) -> list[TokenIds]:
    return [TokenIds(encode(prompt) if isinstance(prompt, str) else prompt) for prompt in prompts]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**31
