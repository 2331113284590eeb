"""Sampling sessions, samples, and what is known of each sampled sequence."""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field, FiniteFloat

from gateway.callers.identity import Caller
from gateway.dialects.token_ids import TokenParameters, token_call
from gateway.errors import InvalidRequest, ObjectNotFound, invalid
from gateway.generations.generation import Call, Pinned
from gateway.rest.bodies import PromptRoute, RestBody
from gateway.tinker.datums import TargetsBody, WantedScores, prompt_targets
from gateway.tinker.door import TinkerDoor, door_of, now
from gateway.tinker.paths import PromiseId, SamplingTarget, sampler_of, weights_path
from gateway.tinker.samples import MOST_ATTEMPTS, WantedSample, turn_of
from gateway.tinker.sdk_bodies import Number, SamplingSessionBody, TinkerBody
from rollout_queue.contract.published_policy import PublishedAdapter
from rollout_queue.trainer_commands import Published

router = APIRouter(tags=["tinker"], route_class=PromptRoute)

BASE_VERSION = 0
"""The version that engines start with: the base model."""
MOST_SAMPLES, MOST_TOP = 1024, 20
Token = Annotated[int, Field(ge=0, lt=2**31)]


class SampledChunk(RestBody):
    type: Literal["encoded_text"]
    tokens: Annotated[list[Token], Field(fail_fast=True)]


class SampledPrompt(RestBody):
    chunks: Annotated[list[SampledChunk], Field(fail_fast=True)]


class SampledParameters(RestBody):
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[Token], Field(fail_fast=True)]
        | None
    ) = None
    temperature: FiniteFloat = Field(1.0, ge=0, le=100)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    top_p: FiniteFloat = Field(1.0, gt=0, le=1)


class SampleBody(TinkerBody):
    sampling_session_id: str = Field(min_length=1, max_length=150)
    seq_id: int = Field(ge=0, lt=2**62)
    prompt: SampledPrompt
    sampling_params: SampledParameters
    num_samples: int = Field(1, ge=1, le=MOST_SAMPLES)
    base_model: None = None
    model_path: None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=MOST_TOP)
    topk_sample_logprobs: int = Field(0, ge=0, le=MOST_TOP)
    target_prompt_logprobs: TargetsBody | None = None
    prompt_alt_tokens_k: int = Field(0, ge=0)
    prompt_logprobs_last_n: Number | None = None
    record_stability_info: bool | None = None


@router.post("/create_sampling_session")
async def create_sampling_session(body: SamplingSessionBody, request: Request) -> JSONResponse:
    """Begin to sample from saved weights, or from the base model."""
    door, caller = door_of(request)
    session = await door.store.session(body.session_id, caller)
    path, base_model = None, door.base_model
    if body.model_path is not None:
        path = weights_path(body.model_path, "model_path")
        if path.kind != "sampler_weights":
            raise invalid("model_path", "save_weights_for_sampler makes weights to sample from")
        model, _ = await door.store.kept(path, caller)
        base_model = model.base_model
    elif body.base_model is not None:
        base_model = door.check_base_model(body.base_model)
    else:
        raise InvalidRequest("base_model or model_path must be given", param="base_model")
    target = SamplingTarget(
        sampling_session_id=sampler_of(session.session_id, body.sampling_session_seq_id),
        session_id=session.session_id,
        owner=caller.owner,
        created_at=now(),
        base_model=base_model,
        model_path=None if path is None else str(path),
        kind="base" if path is None else "snapshot",
        user=session.user,
    )
    await door.store.add_target(target)
    return JSONResponse(
        {"type": "create_sampling_session", "sampling_session_id": target.sampling_session_id}
    )


@router.get("/samplers/{sampling_session_id}")
async def get_sampler(sampling_session_id: str, request: Request) -> JSONResponse:
    """What a sampling session samples from."""
    door, caller = door_of(request)
    target = await door.store.target(sampling_session_id, caller)
    return JSONResponse(
        {
            "sampler_id": target.sampling_session_id,
            "base_model": target.base_model,
            "model_path": target.model_path,
        }
    )


@router.post("/asample")
async def asample(body: SampleBody, request: Request) -> JSONResponse:
    """Begin to sample; returns a promise, and the ids of its sequences."""
    door, caller = door_of(request)
    target = await door.store.target(body.sampling_session_id, caller)
    if body.prompt_alt_tokens_k:
        raise invalid("prompt_alt_tokens_k", "not served here")
    ids = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    wanted = WantedSample(
        promise=PromiseId("s", target.sampling_session_id, body.seq_id),
        call=msgspec.structs.replace(_call(door, body, ids), user=target.session_id),
        user=target.user,
        n=body.num_samples,
        pinned=await pinned_of(door, target, caller),
        scores=_scores(door, body, len(ids)),
    )
    digest = hashlib.sha256(msgspec.msgpack.encode(body.model_dump())).hexdigest()[:32]
    await door.samples.start(wanted, caller, digest)
    return JSONResponse(
        {"request_id": str(wanted.promise), "model_id": None, "sample_sequence_ids": wanted.sequence_ids}
    )


@router.get("/sequences/{sequence_id}")
async def get_sequence(sequence_id: str, request: Request) -> JSONResponse:
    """Which policy version sampled which tokens of a sequence. The SDK does not ask; nothing else says it."""
    door, caller = door_of(request)
    session_id, _, _ = sequence_id.rpartition(".")
    head = await door.gateway.sessions.head(session_id, caller)
    attempts = (head.by_id.get(turn_of(sequence_id, attempt)) for attempt in range(MOST_ATTEMPTS))
    turn = next((each for each in attempts if each is not None and each.finish != "abort"), None)
    if turn is None:
        raise ObjectNotFound(f"there is no sequence {sequence_id!r}")
    return JSONResponse(
        {
            "sequence_id": sequence_id,
            "session_id": session_id,
            "turn_id": turn.turn_id,
            "policy": turn.policy,
            "tokens": len(turn.output_ids),
            "versions": [[span.version, span.start, span.end] for span in turn.versions],
        }
    )


async def pinned_of(door: TinkerDoor, target: SamplingTarget, caller: Caller) -> Pinned:
    """What answers for a target. Raises ObjectNotFound if it is not there any more."""
    if target.model_path is None:
        return Pinned(BASE_VERSION)
    path = weights_path(target.model_path)
    _, kept = await door.store.kept(path, caller)
    if not isinstance(kept.made, Published):
        raise ObjectNotFound(f"{path} holds no weights to sample from")
    if kept.made.policy:
        await _ensure(door, kept.made, kept.created_at)
    return Pinned(kept.made.version, kept.made.policy or None)


async def _ensure(door: TinkerDoor, made: Published, created_at: float) -> None:
    """Have servers load the adapter again, if it has made room for others."""
    servers = door.gateway.fleet.rollout_servers
    if any(server.can_answer(made.version, made.policy) for server in servers):
        return
    await door.gateway.adapters.ensure(
        PublishedAdapter(
            name=made.policy,
            version=made.version,
            location=made.location,
            manifest_sha256=made.manifest_sha256,
            created_at=created_at,
        )
    )


def _call(door: TinkerDoor, body: SampleBody, ids: Sequence[int]) -> Call:
    given = body.sampling_params
    asked: dict[str, Any] = {"temperature": given.temperature, "top_p": given.top_p, "top_k": given.top_k}
    asked |= {} if given.max_tokens is None else {"max_tokens": given.max_tokens}
    asked |= {} if given.seed is None else {"seed": given.seed}
    stop, stop_ids = _stops(given.stop)
    parameters = TokenParameters(asked=asked, stop=stop, stop_ids=stop_ids, ignore_eos=given.stop == [])
    call = token_call(door.gateway.renderer, ids, parameters, "prompt")
    return msgspec.structs.replace(call, top_logprobs=body.topk_sample_logprobs)


def _stops(stop: str | list[str] | list[int] | None) -> tuple[list[str], list[int]]:
    given = [stop] if isinstance(stop, str) else stop or []
    return [each for each in given if isinstance(each, str)], [
        each for each in given if isinstance(each, int)
    ]


def _scores(door: TinkerDoor, body: SampleBody, length: int) -> WantedScores:
    targets = body.target_prompt_logprobs
    return WantedScores(
        logprobs_from=_scored_from(body, length),
        top=body.topk_prompt_logprobs,
        targets=None
        if targets is None
        else prompt_targets(targets, length, door.gateway.renderer.config.vocab_size),
    )


def _scored_from(body: SampleBody, length: int) -> int | None:
    """The first token of the prompt that is scored; None if none is."""
    last_n = body.prompt_logprobs_last_n
    if not body.prompt_logprobs:
        if last_n is not None or body.topk_prompt_logprobs:
            field = "prompt_logprobs_last_n" if last_n is not None else "topk_prompt_logprobs"
            raise invalid(field, "needs prompt_logprobs")
        return None
    if last_n is not None and not 1 <= last_n < length:
        raise invalid("prompt_logprobs_last_n", f"{last_n}, of a prompt with {length} tokens")
    return 0 if last_n is None else length - last_n
