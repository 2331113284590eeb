"""`/inference/v1/generate`: reads token ids with vLLM's sampling parameters, and answers with token ids.

The client renders its messages itself. The `train` client of verifiers speaks this contract, and so prime-rl.

Makes a `Call` of token ids and sampling parameters, for clients that render their messages themselves.

It knows no wire shape, so every API that takes token ids can use it.
"""

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from msgspec import UNSET, Raw, UnsetType

from gateway.callers.identity import Caller
from gateway.dialects.base import Events, ParsedRequest, RecordedAnswer
from gateway.dialects.body_decoding import decode_body
from gateway.dialects.fields import refuse_unserved
from gateway.dialects.token_ids_wire import (
    SAMPLING,
    ChoiceExperts,
    TokenChoice,
    TokenIdLogprob,
    TokenIdLogprobs,
    TokenIdsAnswer,
    TokenIdsRequest,
    TokenSamplingFields,
)
from gateway.dialects.wire import check_sampling, encode, given_fields, sampling_of, stop_strings, usage_of
from gateway.errors import InvalidRequest, invalid
from gateway.generations.generation import Call, Generation
from gateway.language.render import ChatRenderer
from rollout_queue.contract.packed_tokens import TokenIds
from rollout_queue.http.errors import ApiError
from rollout_queue.http.json_routes import worked

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
        raise invalid(param, "the prompt is empty")
    context, count = renderer.context_length, len(token_ids)
    if count >= context:
        raise invalid(
            param,
            f"the prompt has {count} tokens; the context holds {context}, the answer included",
            code="context_length_exceeded",
        )
    _check_ids(renderer, token_ids, param)


def _check_ids(renderer: ChatRenderer, token_ids: Sequence[int], param: str) -> None:
    vocabulary = renderer.config.vocab_size
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocabulary):
        raise invalid(
            param, f"a token id lies outside the vocabulary of {vocabulary}", code="token_out_of_vocabulary"
        )


def _check(renderer: ChatRenderer, parameters: TokenParameters, prompt_tokens: int) -> None:
    stop_ids, asked = parameters.stop_ids, parameters.asked
    if len(stop_ids) > MAX_STOP_IDS:
        raise invalid("stop_token_ids", f"at most {MAX_STOP_IDS}")
    _check_ids(renderer, stop_ids, "stop_token_ids")
    if parameters.ignore_eos and stop_ids:
        raise invalid("ignore_eos", "the engine then ignores stop_token_ids, too; send only one of them")
    limit = asked.get("max_tokens")
    if limit is not None and asked.get("min_tokens", 0) > limit:
        raise invalid("min_tokens", "more than max_tokens")
    salt = parameters.cache_salt
    if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARS:
        raise invalid("cache_salt", f"a text of 1 to {MAX_SALT_CHARS} characters")
    if parameters.experts_from is not None and not 0 <= parameters.experts_from < prompt_tokens:
        raise invalid("routed_experts_prompt_start", "a position in the prompt")


class TokenIdsDialect:
    """The dialect of `/inference/v1/generate`."""

    prefix = "gen-"

    def __init__(self, renderer: ChatRenderer, model_name: str, router_replay: bool) -> None:
        """`router_replay`: the engines report the experts of each token."""
        self._renderer = renderer
        self._model_name = model_name
        self._router_replay = router_replay

    async def read(self, caller: Caller, body: bytes, heavy: bool) -> ParsedRequest:
        return await worked(caller.payer, body, self._read, body)

    def _read(self, body: bytes) -> ParsedRequest:
        request = decode_body(body, TokenIdsRequest, self._renderer.context_length)
        with _named_in_full():
            parameters = parameters_of(request, self._renderer.config.vocab_size, self._router_replay)
            call = token_call(self._renderer, request.token_ids, parameters)
        return ParsedRequest(
            calls=[call],
            responder=TokenIdsResponder(self._renderer, request, request.model or self._model_name),
            n=request.sampling_params.n or 1,
            model=request.model,
        )

    def error(self, error: ApiError) -> bytes:
        return encode(error.body)


def parameters_of(request: TokenIdsRequest, vocab_size: int, router_replay: bool) -> TokenParameters:
    """vLLM's parameters in the gateway's names. Raises InvalidRequest for one that is not served."""
    fields = request.sampling_params
    refuse_unserved(fields, SAMPLING)
    check_sampling(fields)
    if fields.return_routed_experts and not router_replay:
        raise invalid("return_routed_experts", "this gateway records no experts (gateway.router_replay)")
    stop = stop_strings(fields.stop)
    if stop and fields.skip_special_tokens:
        raise invalid("skip_special_tokens", "stop strings are looked for in the text with special tokens")
    asked = sampling_of(fields, vocab_size) | given_fields(fields, ("max_tokens",))
    if fields.min_tokens:
        asked["min_tokens"] = fields.min_tokens
    if asked.get("seed") == -1:  # vLLM's way to say: none
        del asked["seed"]
    experts = router_replay and fields.return_routed_experts is not False
    return TokenParameters(
        asked=asked,
        stop=stop,
        stop_ids=fields.stop_token_ids or (),
        ignore_eos=bool(fields.ignore_eos),
        cache_salt=request.cache_salt,
        experts_from=(fields.routed_experts_prompt_start or 0) if experts else None,
    )


@contextmanager
def _named_in_full() -> Iterator[None]:
    """Errors name a parameter as it stands in the body: `sampling_params.seed`."""
    try:
        yield
    except InvalidRequest as error:
        if error.param not in TokenSamplingFields.__struct_fields__:
            raise
        param = f"sampling_params.{error.param}"
        raise InvalidRequest(f"sampling_params.{error.message}", param=param, code=error.code) from error


class TokenIdsResponder:
    """Writes the reply to one request."""

    def __init__(self, renderer: ChatRenderer, request: TokenIdsRequest, model: str) -> None:
        self._experts_per_token = renderer.config.num_experts_per_tok
        self._request = request
        self._model = model

    def body(self, recorded: Sequence[RecordedAnswer]) -> bytes:
        generations = [each.generation for each in recorded]
        first = generations[0]
        answer = TokenIdsAnswer(
            request_id=first.completion_id,
            model=self._model,
            choices=[self._choice(index, each) for index, each in enumerate(recorded)],
            usage=usage_of(generations, self._request.sampling_params.n or 1),
            prompt_token_ids=first.prompt.prompt_ids.tolist() if self._request.return_token_ids else UNSET,
        )
        return encode(answer)

    def events(self, generations: Sequence[Generation]) -> Events:
        raise NotImplementedError("the dialect refuses `stream`")

    def _choice(self, index: int, recorded: RecordedAnswer) -> TokenChoice:
        generation, turn, _ = recorded
        pairs = zip(generation.ids, generation.logprobs, strict=True)
        # Each is encoded by itself, as in `logprobs.py`: encoding holds the interpreter's lock.
        content = [Raw(encode(TokenIdLogprob(f"token_id:{token}", logprob))) for token, logprob in pairs]
        return TokenChoice(
            index=index,
            token_ids=generation.ids,
            logprobs=TokenIdLogprobs(content),
            finish_reason=turn.finish,
            turn_id=turn.turn_id,
            versions=turn.versions,
            routed_experts=self._experts(generation),
        )

    def _experts(self, generation: Generation) -> ChoiceExperts | UnsetType:
        """The experts of the tokens that were asked for, unless the engines did not report them all."""
        start, experts, each = generation.call.experts_from, generation.experts, self._experts_per_token
        if start is None or experts is None or not each:
            return UNSET
        rows = len(generation.prompt.prompt_ids) + len(generation.ids) - 1 - start
        if not 0 < rows <= experts.rows or experts.width % each:
            return UNSET
        data = b64encode(experts.last(rows).packed).decode()
        dtype = "uint8" if experts.item_bytes == 1 else "uint16"
        return ChoiceExperts(data, (rows, experts.width // each, each), start, dtype)
