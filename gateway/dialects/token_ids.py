"""`/inference/v1/generate`: reads token ids with vLLM's sampling parameters, and answers with token ids.

The client renders its messages itself. The `train` client of verifiers speaks this contract, and so prime-rl.
"""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec import UNSET, Raw, UnsetType

from gateway.callers.identity import Caller
from gateway.dialects.base import Events, ParsedRequest, RecordedAnswer
from gateway.dialects.fields.checks import refuse_unserved
from gateway.dialects.fields.decoding import decode_body
from gateway.dialects.token_call import TokenParameters, token_call
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
from gateway.dialects.wire import (
    check_sampling,
    encode,
    given_fields,
    sampling_of,
    stop_strings,
    usage_of,
)
from gateway.errors import InvalidRequest
from gateway.generations.generation import Generation
from gateway.language.render import ChatRenderer
from rollout_queue.http.bodies.large_bodies import worked
from rollout_queue.http.errors import ApiError


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
        message = "return_routed_experts: this gateway records no experts (gateway.router_replay)"
        raise InvalidRequest(message, param="return_routed_experts")
    stop = stop_strings(fields.stop)
    if stop and fields.skip_special_tokens:
        message = "skip_special_tokens: stop strings are looked for in the text with special tokens"
        raise InvalidRequest(message, param="skip_special_tokens")
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
