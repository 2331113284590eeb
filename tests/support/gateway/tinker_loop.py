"""A user's training loop, as far as it is HTTP: the requests of the Tinker SDK, made by hand."""

from array import array
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import httpx

from gateway.rest.bodies import PROTOBUF
from gateway.tinker import messages_pb2 as wire
from tests.support.gateway.running import CLIENT_KEY, OTHER_KEY, RunningGateway

ADAM = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}


@dataclass
class TinkerLoop:
    """One client session with one model. Each method sends one request, and returns the reply."""

    gateway: RunningGateway
    base_model: str
    key: str = f"tml-{CLIENT_KEY}"
    session_id: str = ""
    model_id: str = ""

    def call(self, method: str, path: str, body: Any = None, key: str = "", **more: Any) -> Any:
        """Any request, with the key of this client or another one."""
        headers = {"x-api-key": key or self.key} | more.pop("headers", {})
        return self.gateway.call(method, f"/api/v1/{path}", body, key=None, headers=headers, **more)

    def post(self, verb: str, body: Any, **more: Any) -> Any:
        return self.call("POST", verb, body, **more)

    def get(self, path: str, **query: Any) -> Any:
        return self.call("GET", path, params=query or None)

    def of_another_key(self) -> Self:
        """A client with another key, which knows the names of this one's session and model."""
        return replace(self, key=f"tml-{OTHER_KEY}")

    def begin(self, lora: dict[str, Any] | None = None, seq: int = 0, **session: Any) -> dict[str, Any]:
        """Make a session and a model; returns its promise. `session`: more of the session's body."""
        body: dict[str, Any] = {
            "tags": [],
            "user_metadata": None,
            "sdk_version": "0.38.0",
            "type": "create_session",
        } | session
        self.session_id = self.post("create_session", body).json()["session_id"]
        self.model_id = f"{self.session_id}:train:{seq}"
        return self.create(lora, seq)

    def create(self, lora: dict[str, Any] | None = None, seq: int = 0) -> dict[str, Any]:
        made = self.post(
            "create_model",
            {
                "session_id": self.session_id,
                "model_seq_id": seq,
                "base_model": self.base_model,
                "lora_config": lora or {"rank": 8},
                "type": "create_model",
            },
        )
        assert made.status_code == 200, made.text
        promise: dict[str, Any] = made.json()
        return promise

    def command(self, verb: str, number: int, **body: Any) -> Any:
        return self.post(verb, {"model_id": self.model_id, "seq_id": number, "type": verb, **body})

    def done(self, verb: str, number: int, **body: Any) -> Any:
        """A command and its result."""
        return self.poll(self.command(verb, number, **body).json()).json()

    def stepped(self) -> Self:
        """Make a step, with the commands 1 and 2."""
        self.pass_(1, ONE)
        self.done("optim_step", 2, adam_params=ADAM)
        return self

    def finish(self, reason: str = "success", **more: Any) -> int:
        """End the client session; returns the status."""
        body = {"reason": {"type": reason}, **more}
        return int(self.post(f"sessions/{self.session_id}/finish", body).status_code)

    def pass_(self, number: int, *datums: wire.Datum, loss: str = "cross_entropy", **more: Any) -> Any:
        request = wire.ForwardBackwardRequest(
            model_id=self.model_id, seq_id=number, data=datums, loss_fn=loss, **more
        )
        return self.send(request.SerializeToString())

    def send(self, body: bytes, **headers: str) -> httpx.Response:
        given = {"x-api-key": self.key, "content-type": PROTOBUF} | headers
        return self.gateway.http.post(
            f"{self.gateway.url}/api/v1/forward_backward", content=body, headers=given
        )

    def poll(self, promise: dict[str, Any], **more: Any) -> Any:
        return self.post("retrieve_future", {"request_id": promise["request_id"], **more})


@dataclass
class SamplingLoop(TinkerLoop):
    """A client session with a sampling session of the base model."""

    sampler: str = ""

    def start(self, **session: Any) -> Self:
        self.begin(**session)
        body = {"session_id": self.session_id, "sampling_session_seq_id": 0, "base_model": self.base_model}
        self.sampler = self.post("create_sampling_session", body).json()["sampling_session_id"]
        return self

    def ask(
        self, number: int, tokens: list[int], params: dict[str, Any] | None = None, **replaced: Any
    ) -> Any:
        body = {
            "sampling_session_id": self.sampler,
            "seq_id": number,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            "sampling_params": {"max_tokens": 8} | (params or {}),
            "type": "sample",
        }
        return self.post("asample", body | replaced)

    def sample(self, *arguments: Any, **more: Any) -> wire.SampleResponse:
        promise = self.ask(*arguments, **more)
        assert promise.status_code == 200, promise.text
        return sampled(self.poll(promise.json()))


def sampled(reply: Any) -> wire.SampleResponse:
    assert reply.headers["content-type"] == PROTOBUF, reply.text
    response = wire.SampleResponse()
    response.ParseFromString(reply.content)
    return response


def datum(tokens: list[int], targets: list[int], **numbers: list[float]) -> wire.Datum:
    """A datum as the SDK sends it."""
    made = wire.Datum()
    made.model_input.add().encoded_text.tokens = array("i", tokens).tobytes()
    made.loss_fn_inputs["target_tokens"].CopyFrom(tensor(array("q", targets), [len(tokens)]))
    for name, values in numbers.items():
        made.loss_fn_inputs[name].CopyFrom(tensor(array("f", values), [len(tokens)]))
    return made


def tensor(values: "array[Any]", shape: list[int]) -> wire.Tensor:
    dtype = {"q": wire.DTYPE_INT64, "i": wire.DTYPE_INT32, "f": wire.DTYPE_FLOAT32}[values.typecode]
    return wire.Tensor(dense=values.tobytes(), dtype=dtype, shape=shape)


ONE = datum([1, 2, 3], [2, 3, 7], weights=[0.0, 1.0, -2.5])


def passed(reply: httpx.Response) -> tuple[list[list[float]], dict[str, float]]:
    """The log-probabilities of each datum, and the metrics."""
    assert reply.headers["content-type"] == PROTOBUF, reply.text
    output = wire.ForwardBackwardOutput()
    output.ParseFromString(reply.content)
    (record,) = output.loss_fn_outputs
    tensor = record.fields["logprobs"]
    ends = array("q", tensor.offsets)
    parts = [array("f", tensor.data[start:end]) for start, end in pairwise(ends)]
    assert len(parts) == record.num_datums
    return [list(each) for each in parts], dict(output.metrics)
