"""Writes the result of a command as the SDK reads it: JSON, or protobuf for forward_backward."""

from array import array
from typing import Any

import msgspec

from gateway.edge.request import JSON
from gateway.rest.json_bodies import PROTOBUF
from gateway.rest.tinker_api.paths import WeightsPath, sampler_of, session_of
from gateway.rest.tinker_api.wire import messages_pb2 as wire
from rollout_queue.commands.command import LoadWeights, SaveExternal, SaveForSampler, SaveWeights
from rollout_queue.commands.result import Answer, CommandFailed, Created, Exported, Passed, Stepped
from rollout_queue.contract.tokens import pack


def body_of(model_id: str, answer: Answer) -> tuple[bytes, str]:
    """The body and its media type."""
    if isinstance(answer.result, Passed):
        return _passed(answer.result), PROTOBUF
    return msgspec.json.encode(_json(model_id, answer)), JSON


def _json(model_id: str, answer: Answer) -> dict[str, Any]:
    match answer.result, answer.command:
        case CommandFailed(error, category), _:
            return {"error": error, "category": category}
        case Created(), _:
            return {"model_id": model_id, "type": "create_model"}
        case Stepped(metrics), _:
            return {"metrics": metrics, "type": "optim_step"}
        case _, SaveWeights(name=name):
            return {"path": str(WeightsPath(model_id, "weights", name)), "type": "save_weights"}
        case _, SaveForSampler(name=name):
            return _sampleable(model_id, name) | {"type": "save_weights_for_sampler"}
        case Exported(size_bytes=size), SaveExternal(name=name):
            path = str(WeightsPath(model_id, "external_weights", name))
            return {"path": path, "size_bytes": size, "type": "save_weights_external"}
        case _, LoadWeights(model_id=source, name=name):
            path = str(WeightsPath(source, "weights", name))
            return {"path": path, "model_id": model_id, "type": "load_weights"}
    raise ValueError(f"a result without its command: {answer}")


def _sampleable(model_id: str, name: str) -> dict[str, Any]:
    if not name.startswith("~"):
        return {"path": str(WeightsPath(model_id, "sampler_weights", name))}
    number = int(name.rpartition("~")[2])
    return {"sampling_session_id": sampler_of(session_of(model_id), number)}


def _passed(passed: Passed) -> bytes:
    offsets, end = array("q", [0]), 0
    packed = [pack(each) for each in passed.logprobs]
    for each in packed:
        end += len(each)
        offsets.append(end)
    logprobs = wire.BatchedTensor(
        data=b"".join(packed),
        offsets=offsets.tobytes(),
        dtype=wire.DTYPE_FLOAT32,
        trailing_shape=[passed.k] if passed.k > 1 else [],
    )
    record = wire.ArrayRecord(
        type_tag="ArrayRecord", fields={"logprobs": logprobs}, num_datums=len(passed.logprobs)
    )
    output = wire.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=passed.metrics
    )
    encoded: bytes = output.SerializeToString()
    return encoded
