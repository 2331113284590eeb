"""The commands of a model: create, forward_backward, optim_step, save and load.

body ─▶ command ─▶ log (durable, once, in order) ─▶ the id of its promise

Commands that are refused when they arrive. Their numbers are used up, so the log gets them too.
"""

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.responses import Response

from gateway.callers.identity import Caller
from gateway.edge.request import HEAVY_BYTES
from gateway.errors import GatewayError, InvalidRequest, ObjectNotFound, invalid
from gateway.rest.bodies import PROTOBUF
from gateway.tinker.datums import ReadPass
from gateway.tinker.door import TinkerDoor, door_of, now
from gateway.tinker.paths import (
    ClientModel,
    KeptTerms,
    PromiseId,
    SamplingTarget,
    WeightsPath,
    ephemeral,
    given_name,
    model_of,
    sampler_of,
    weights_path,
)
from gateway.tinker.sdk_bodies import (
    CreateModelBody,
    LoadWeightsBody,
    LoraBody,
    ModelBody,
    OptimStepBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SaveWeightsBody,
    WeightsInfoBody,
)
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.foreign_json import read_json
from rollout_queue.http.json_routes import Handler, JsonRoute
from rollout_queue.trainer_commands import (
    SHARED,
    Command,
    CreateModel,
    LoadWeights,
    LoraSpec,
    OptimStep,
    Refused,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
)

LARGEST = 2**31


class CommandRoute(JsonRoute):
    """A route whose body has a model and the number of a command."""

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()

        async def booked(request: Request) -> Response:
            try:
                return await handler(request)
            except (RequestValidationError, InvalidRequest, ObjectNotFound) as error:
                with suppress(GatewayError, StorageUnavailable, ValueError, KeyError, TypeError):
                    await _book(request, _sentence(error))
                raise

        return booked


async def _book(request: Request, why: str) -> None:
    """Put a refused command into the log, if the body has a model of the caller and a number."""
    body = await request.body()
    given = read_json(body)
    model_id, number = given["model_id"], given["seq_id"]
    if not isinstance(model_id, str) or type(number) is not int or not 0 <= number < LARGEST:
        return
    door, caller = door_of(request)
    await door.store.model(model_id, caller)
    await door.submit(model_id, number, Refused(why), hashlib.sha256(body).hexdigest()[:32])


def _sentence(error: RequestValidationError | GatewayError) -> str:
    if isinstance(error, GatewayError):
        return error.message
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'][1:])}: {first['msg']}"


router = APIRouter(tags=["tinker"], route_class=CommandRoute)

T = TypeVar("T")
OPTIMIZER = {"type": "adamw"}
PASS_BODY = {
    "requestBody": {
        "required": True,
        "content": {PROTOBUF: {"schema": {"type": "string", "format": "binary"}}},
    }
}
"""What OpenAPI's document says of the body of forward_backward; messages.proto says what it holds."""


@router.post("/create_model")
async def create_model(body: CreateModelBody, request: Request) -> JSONResponse:
    """Make a model: the base model with an adapter, or all of its weights without `lora_config`."""
    door, caller = door_of(request)
    session = await door.store.session(body.session_id, caller)
    base_model = door.check_base_model(body.base_model)
    await check_trainer(door)
    model = ClientModel(
        model_id=model_of(body.session_id, body.model_seq_id),
        session_id=body.session_id,
        owner=caller.owner,
        created_at=now(),
        base_model=base_model,
        lora=_lora(body.lora_config),
        user_metadata=body.user_metadata,
        user=session.user,
    )
    await door.store.add_model(model)
    return _promise(await door.submit(model.model_id, 0, CreateModel(base_model, model.lora)))


async def check_trainer(door: TinkerDoor) -> None:
    """Raises InvalidRequest if the trainer would never carry out a command."""
    if await door.trains_commands() is False:
        message = "this deployment trains on the turns of agents; trainer.source: commands serves this API"
        raise InvalidRequest(message, code="trainer_source")


@router.post("/get_info")
async def get_info(body: ModelBody, request: Request) -> JSONResponse:
    """What a model was made of."""
    door, caller = door_of(request)
    model = await door.store.model(body.model_id, caller)
    data = {"arch": None, "model_name": model.base_model, "tokenizer_id": door.base_model}
    return JSONResponse(
        {
            "type": "get_info",
            "model_id": model.model_id,
            "model_data": data,
            "model_name": model.base_model,
            "is_lora": model.lora is not None,
            "lora_rank": model.lora and model.lora.rank,
            "optimizer_config": OPTIMIZER,
        }
    )


@router.post("/forward_backward", openapi_extra=PASS_BODY)
async def forward_backward(request: Request) -> JSONResponse:
    """Compute log-probabilities and a loss, and add its gradient; the body is protobuf."""
    door, caller = door_of(request)
    body = await request.body()
    read = await _in_thread(len(body), lambda: ReadPass(body))
    await door.store.model(read.model_id, caller)
    command = await _in_thread(len(body), lambda: _of_pass(door, read))
    return _promise(await door.submit(read.model_id, read.number, command))


async def _in_thread(size: int, work: Callable[[], T]) -> T:
    """Do the work for a body of this size: in a thread if it is large, so that others do not wait."""
    return await asyncio.to_thread(work) if size > HEAVY_BYTES else work()


def _of_pass(door: TinkerDoor, read: ReadPass) -> Command:
    """The command; a refused one if its data contradict themselves, because its number is used up."""
    try:
        return read.command(door.gateway.renderer.config.vocab_size)
    except InvalidRequest as error:
        return Refused(error.message)


@router.post("/optim_step")
async def optim_step(body: OptimStepBody, request: Request) -> JSONResponse:
    """Make a step of AdamW with the gradient since the last one."""
    door, caller = door_of(request)
    await door.store.model(body.model_id, caller)
    adam = body.adam_params
    command = OptimStep(
        adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.grad_clip_norm
    )
    return _promise(await door.submit(body.model_id, body.seq_id, command))


@router.post("/save_weights")
async def save_weights(body: SaveWeightsBody, request: Request) -> JSONResponse:
    """Write weights and optimizer as a named checkpoint."""
    door, caller = door_of(request)
    model = await door.store.model(body.model_id, caller)
    name = given_name(f"step-{body.seq_id}" if body.path is None else body.path)
    path = WeightsPath(model.model_id, "weights", name)
    terms = KeptTerms(ttl_s=body.ttl_seconds, user_metadata=body.user_metadata)
    await door.store.weights.note_terms(path, body.seq_id, terms)
    command: Command = SaveWeights(name, body.overwrite)
    return _promise(await door.submit(model.model_id, body.seq_id, command))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(body: SaveForSamplerBody, request: Request) -> JSONResponse:
    """Publish the present weights: under a name, or for the sampling session that the answer names."""
    door, caller = door_of(request)
    model = await door.store.model(body.model_id, caller)
    named, number = body.path, body.sampling_session_seq_id
    if (named is None) == (number is None):
        raise InvalidRequest("either path or sampling_session_seq_id must be given", param="path")
    if number is None:
        name = given_name(named or "")
        terms = KeptTerms(ttl_s=body.ttl_seconds, user_metadata=body.user_metadata)
        path = WeightsPath(model.model_id, "sampler_weights", name)
        await door.store.weights.note_terms(path, body.seq_id, terms)
    else:
        name = ephemeral(number)
        shared = body.kind == "inflight"
        path = WeightsPath(model.model_id, "sampler_weights", SHARED if shared else name)
        await door.store.add_target(
            SamplingTarget(
                sampling_session_id=sampler_of(model.session_id, number),
                session_id=model.session_id,
                owner=model.owner,
                created_at=now(),
                base_model=model.base_model,
                model_path=str(path),
                kind=body.kind,
                user=model.user,
            )
        )
    command = SaveForSampler(name, shared=body.kind == "inflight" and number is not None)
    # The SDK takes another sampling session when it sends the same command again. The first one counts.
    digest = None if number is None else f"for a {body.kind} sampling session"
    return _promise(await door.submit(model.model_id, body.seq_id, command, digest))


@router.post("/save_weights_external")
async def save_weights_external(body: SaveExternalBody, request: Request) -> JSONResponse:
    """Export the present weights under a name, as files for other programs."""
    door, caller = door_of(request)
    model = await door.store.model(body.model_id, caller)
    if body.age_encryption_recipients:
        field = "age_encryption_recipients"
        raise invalid(field, "not served here")
    name = given_name(body.path)
    path = WeightsPath(model.model_id, "external_weights", name)
    await door.store.weights.note_terms(path, body.seq_id, KeptTerms(ttl_s=body.ttl_seconds))
    return _promise(await door.submit(model.model_id, body.seq_id, SaveExternal(name)))


@router.post("/load_weights")
async def load_weights(body: LoadWeightsBody, request: Request) -> JSONResponse:
    """Load a checkpoint: into a new model of a session, or into a model that exists."""
    door, caller = door_of(request)
    if body.weights_access_token is not None:
        raise invalid("weights_access_token", "not served here")
    path = weights_path(body.path)
    if path.kind != "weights":
        raise invalid("path", f"{path} has no state of the optimizer")
    source = await _source(door, path, caller)
    command = LoadWeights(path.model_id, path.name, body.optimizer)
    if body.session_id is not None and body.model_seq_id is not None:
        model = await _loaded_model(door, caller, body, source)
        return _promise(await door.submit(model.model_id, 0, command))
    if body.model_id is None or body.seq_id is None:
        raise InvalidRequest("session_id and model_seq_id must be given, or model_id and seq_id")
    await door.store.model(body.model_id, caller)
    return _promise(await door.submit(body.model_id, body.seq_id, command))


async def _source(door: TinkerDoor, path: WeightsPath, caller: Caller) -> ClientModel:
    """The model that saved these weights. If it has not yet, its command may be on its way, so only weights
    that have expired are refused here."""
    with suppress(ObjectNotFound):
        model, _ = await door.store.kept(path, caller)
        return model
    model = await door.store.model(path.model_id, caller)
    if await door.log.kept_as(path.model_id, path.kept_as) is not None:
        raise ObjectNotFound(f"the weights {path} have expired", param="path")
    return model


async def _loaded_model(
    door: TinkerDoor, caller: Caller, body: LoadWeightsBody, source: ClientModel
) -> ClientModel:
    session = await door.store.session(body.session_id or "", caller)
    await check_trainer(door)
    if body.base_model is not None:
        door.check_base_model(body.base_model)
    model = ClientModel(
        model_id=model_of(session.session_id, body.model_seq_id or 0),
        session_id=session.session_id,
        owner=caller.owner,
        created_at=now(),
        base_model=source.base_model,
        lora=source.lora,
        user_metadata=body.user_metadata,
        user=session.user,
    )
    await door.store.add_model(model)
    return model


@router.post("/weights_info")
async def weights_info(body: WeightsInfoBody, request: Request) -> JSONResponse:
    """What a checkpoint was made of, for a client that loads it."""
    door, caller = door_of(request)
    model, _ = await door.store.kept(weights_path(body.tinker_path, "tinker_path"), caller)
    lora = model.lora
    return JSONResponse(
        {
            "base_model": model.base_model,
            "optimizer_config": OPTIMIZER,
            "is_lora": lora is not None,
            "lora_rank": lora and lora.rank,
            "train_unembed": lora and lora.train_unembed,
            "train_mlp": lora and lora.train_mlp,
            "train_attn": lora and lora.train_attn,
        }
    )


def _lora(body: LoraBody | None) -> LoraSpec | None:
    if body is None:
        return None
    return LoraSpec(
        rank=body.rank,
        seed=body.seed,
        train_mlp=body.train_mlp,
        train_attn=body.train_attn,
        train_unembed=body.train_unembed,
    )


def _promise(promise: PromiseId) -> JSONResponse:
    model_id = promise.of if promise.kind == "c" else None
    return JSONResponse({"request_id": str(promise), "model_id": model_id})
