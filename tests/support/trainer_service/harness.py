"""A trainer in the test's own process, on a stream in memory, with a model so small that steps are fast."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Outcome, Reward, Sampling, SessionSpec, Span, Turn, Verdict
from rollout_queue.contract.stream import NO_IMAGES, Entry
from rollout_queue.http.callers import Keyring
from tests.support.queue.memory_stream import MemoryStream
from tests.support.trainer_service.publications import InlineExecutor
from trainer_service.app import create_app
from trainer_service.heartbeat import Heartbeat
from trainer_service.intake import Intake
from trainer_service.model.deepspeed_policy import DeepSpeedPolicy
from trainer_service.publishing.gateway_client import GatewayClient
from trainer_service.publishing.places import place_of
from trainer_service.publishing.publisher import Publisher
from trainer_service.publishing.tensor_sender import TensorSender
from trainer_service.settings import TrainerSettings
from trainer_service.shared_state import SharedState
from trainer_service.sinks import Sink, chosen_sinks
from trainer_service.step.device_memory import DeviceMemory, RolloutMemory
from trainer_service.step.ranks import DistributedPolicy
from trainer_service.step.teacher import TeacherClient
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.policy_store import PolicyStore
from trainer_service.storage.run_state import LedgerStep
from trainer_service.train import Trainer
from trainer_service.trainer_metrics import TrainerMetrics


@dataclass
class FakeGateway:
    """Plays the routes of the gateway that publishing uses."""

    versions: list[int] = field(default_factory=lambda: [0])
    announced: list[dict[str, Any]] = field(default_factory=list)
    refusals: int = 0
    """How many announcements get a 503 before one is accepted."""
    server_ok: bool = True
    refuses: bool = True
    """Whether a server that does not take a version refuses it; else it fails, and may take it later."""
    has_results: bool = True
    """Whether the gateway still knows what each server did in a push."""
    conflict: bool = False
    serving: int | None = None
    """The version that is served whatever is published; None serves the newest."""
    rolled_back_to: int | None = None
    idle: bool = False
    """Whether the fleet serves no version."""
    target: int | None = None
    speechless: bool = False
    """Whether the gateway does not say whether it needs a version."""
    away: bool = False
    nonsense: int = 0
    """How many requests get a proxy's HTML page before one is answered properly."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.nonsense:
            self.nonsense -= 1
            return httpx.Response(200, text="<html>welcome</html>")
        if self.away:
            raise httpx.ConnectError("refused", request=request)
        if request.url.path == "/admin/policies/serving":
            served = self.served
            return httpx.Response(200, json={"serving": served, "target": self.target or served})
        if request.method == "DELETE":
            return self._remove(int(request.url.path.rpartition("/")[2]))
        if request.url.path == "/admin/policies" and request.method == "GET":
            return httpx.Response(200, json={"data": [{"version": v} for v in self.versions]})
        if request.method == "GET":
            return self._detail(int(request.url.path.rpartition("/")[2]))
        if self.refusals:
            self.refusals -= 1
            return httpx.Response(503, json={"error": {"message": "Redis is away"}})
        if self.conflict:
            return httpx.Response(409, json={"error": {"message": "known with other content"}})
        body = httpx.Response(200, content=request.content).json()
        if request.url.path == "/admin/policies/rollback":
            return self._roll_back(body["to"])
        self.announced.append(body)
        self.versions.append(body["version"])
        self.rolled_back_to = None
        push = self._push(body["version"], "pushing")
        return httpx.Response(202, json={"version": body["version"], "state": "pushing", "push": push})

    @property
    def announced_versions(self) -> list[int]:
        return [body["version"] for body in self.announced]

    @property
    def served(self) -> int | None:
        if self.idle:
            return None
        named = (self.serving, self.rolled_back_to, self.versions[-1])
        return next(version for version in named if version is not None)

    def _roll_back(self, version: int) -> httpx.Response:
        if version not in self.versions:
            return httpx.Response(404, json={"error": {"message": f"no policy has version {version}"}})
        self.rolled_back_to = version
        return self._pushed(version)

    def _remove(self, version: int) -> httpx.Response:
        if self.speechless:
            return httpx.Response(503, json={"error": {"message": "Redis is away"}})
        if version in (self.served, self.target):
            return httpx.Response(409, json={"error": {"message": f"version {version} is served"}})
        return httpx.Response(200, json={"version": version, "removed": True})

    def _detail(self, version: int) -> httpx.Response:
        push = self._push(version, "serving" if self.server_ok else "failed")
        results = [self._result(version)] if self.has_results else []
        return httpx.Response(200, json={"version": version, "push": push, "results": results})

    def _pushed(self, version: int) -> httpx.Response:
        status = 200 if self.server_ok else 207
        return httpx.Response(status, json={"version": version, "results": [self._result(version)]})

    def _push(self, version: int, state: str) -> dict[str, Any]:
        return {"id": version + 1, "version": version, "state": state, "started_at": 100.0}

    def _result(self, version: int) -> dict[str, Any]:
        error = None if self.server_ok else "broken"
        unproved = "refused" if self.refuses else "failed"
        return {
            "server": "r0",
            "ok": self.server_ok,
            "state": "proved" if self.server_ok else unproved,
            "version_served": version,
            "total_s": 0.1,
            "error": error,
        }


def turn(session_id: str = "s1", turn_id: str = "t1", **fields: Any) -> Turn:
    """A turn. Fields that are not given have invented values."""
    output = fields.pop("output_ids", [10, 11, 1])
    given: dict[str, Any] = {
        "context_ids": TokenIds(fields.pop("context_ids", [2, 3, 4])),
        "output_ids": TokenIds(output),
        "logprobs": Logprobs(fields.pop("logprobs", [-4.0] * len(output))),
        "versions": (Span(fields.pop("version", 0), 0, len(output)),),
        "sampling": Sampling(used={"temperature": fields.pop("temperature", 1.0)}),
        "finish": "stop",
        "started_at": 100.0,
        "finished_at": 101.0,
    }
    return Turn(turn_id=turn_id, session_id=session_id, **(given | fields))


class Agents:
    """Writes episodes into the stream as gateways do."""

    def __init__(self, stream: MemoryStream) -> None:
        self._stream = stream

    def open(self, session_id: str, group_id: str | None = None, size: int | None = None) -> None:
        spec = SessionSpec(session_id=session_id, group_id=group_id, group_size=size, created_at=100.0)
        asyncio.run(self._stream.open_session(spec))

    def call(self, *turns: Turn, images: Mapping[str, bytes] = NO_IMAGES) -> None:
        for each in turns:
            asyncio.run(self._stream.append_turn(each, expires_at=1e12, images=images))

    def reward(
        self, session_id: str, value: float, key: str = "k", turn_id: str | None = None, at: float = 102.0
    ) -> None:
        self.rewarded(Reward(session_id=session_id, value=value, key=key, turn_id=turn_id, created_at=at))

    def rewarded(self, reward: Reward) -> None:
        asyncio.run(self._stream.append_reward(reward))

    def finish(self, session_id: str, value: float | None = None, **fields: Any) -> None:
        spec, at = self._stream.heads[session_id].spec, fields.pop("at", 103.0)
        given: dict[str, Any] = {
            "status": "completed",
            "group_id": spec.group_id,
            "group_size": spec.group_size,
        }
        outcome = Outcome(session_id=session_id, created_at=at, **(given | fields))
        reward = None if value is None else Reward(
            session_id=session_id, value=value, key="finish", created_at=at
        )  # fmt: skip
        asyncio.run(self._stream.append_outcome(outcome, reward, None))

    def evaluate(self, session_id: str, value: float | None, version: int = 0, **fields: Any) -> None:
        """A session as a gateway records one for `{"policy": "policy@…"}` or `{"train": false}`."""
        asyncio.run(
            self._stream.open_session(SessionSpec(session_id=session_id, train=False, created_at=100.0))
        )
        self.call(
            turn(session_id, f"{session_id}-t", version=version, train=False, task_id=fields.get("task_id"))
        )
        self.finish(session_id, value, train=False, **fields)

    def delete(self, session_id: str) -> None:
        asyncio.run(self._stream.delete_session(session_id))

    def episode(self, session_id: str, value: float, **fields: Any) -> None:
        """A session of one turn, rewarded and finished; without `group_id` it has no group."""
        self.open(session_id, fields.pop("group_id", None), fields.pop("size", None))
        reason, at = fields.pop("reason", None), fields.pop("at", 103.0)
        self.call(turn(session_id, f"{session_id}-t", **fields))
        self.finish(session_id, value, reason=reason, at=at)

    def group(self, group_id: str, values: Sequence[float], **fields: Any) -> None:
        for index, value in enumerate(values):
            output = [10 + index, 20 + index, 1]
            self.episode(
                f"{group_id}-{index}", value, group_id=group_id, size=len(values), output_ids=output, **fields
            )


@dataclass
class Harness:
    """All parts of a trainer process except its HTTP. `restart` plays a new process on the same disk."""

    root: Path
    settings: TrainerSettings
    stream: MemoryStream
    gateway: FakeGateway
    shared_state: SharedState = field(default_factory=SharedState)
    teacher: Callable[[httpx.Request], httpx.Response] = lambda request: httpx.Response(503)
    """Answers for the teacher, if the settings have one."""
    memory_server: Callable[[httpx.Request], httpx.Response] = lambda request: httpx.Response(503)
    """Answers for the rollout servers of `shared_with`, if the settings have any."""
    sinks: Sequence[Sink] = ()
    """Sinks in addition to those in the settings."""
    executor: Executor = field(default_factory=InlineExecutor)
    """Runs publications. By default a publication is complete when the step is."""
    writer: Executor = field(default_factory=InlineExecutor)
    """Writes checkpoints. By default a checkpoint is durable when the step is made."""
    closing: ExitStack = field(default_factory=ExitStack)
    """Closes what this harness and its successors opened, when the test is over."""

    def __post_init__(self) -> None:
        self.agents = Agents(self.stream)
        self.registry = CollectorRegistry()
        self.metrics = metrics = TrainerMetrics(self.registry, [*self.sinks, *chosen_sinks(self.settings)])
        client = httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(self.gateway))
        self.closing.callback(client.close)
        self.closing.callback(metrics.close)
        self.heartbeat = heartbeat = Heartbeat(self.stream, self.shared_state, self.settings.retry_s)
        servers = httpx.Client(transport=httpx.MockTransport(lambda request: self.memory_server(request)))
        self.memory = DeviceMemory(
            [RolloutMemory(servers, url) for url in self.settings.shared_with], heartbeat
        )
        self.closing.callback(servers.close)
        self.closing.callback(self.memory.close)
        self.policy = DeepSpeedPolicy(self.settings)
        self.checkpoints = Checkpoints(
            self.settings.checkpoint_dir, self.settings.keep_checkpoints, self.writer
        )
        collective = self.settings.transport == "collective"
        self.sender = TensorSender(self.settings.collective, torch.device("cpu")) if collective else None
        if self.sender is not None:
            self.closing.callback(self.sender.close)
        self.store = PolicyStore(
            self.settings.policies_dir,
            self.settings.model_path,
            self.settings.keep_policies,
            collective=collective,
        )
        api = GatewayClient(client, self.settings.push_timeout_s)
        images = self.policy.images.rule if self.policy.images else None
        self.intake = Intake(
            self.stream, self.settings.algorithm, self.policy.vocab_size, heartbeat, metrics, images=images
        )
        asked = httpx.MockTransport(lambda request: self.teacher(request))
        self.trainer = Trainer(
            settings=self.settings,
            policy=DistributedPolicy(self.policy),
            intake=self.intake,
            checkpoints=self.checkpoints,
            publisher=Publisher(
                self.store,
                api,
                self.stream,
                place_of(self.settings, self.store, lambda: self.shared_state.stopping),
                heartbeat,
                metrics,
                self.executor,
                self.sender,
            ),
            metrics=metrics,
            shared_state=self.shared_state,
            heartbeat=heartbeat,
            teacher=TeacherClient(
                self.settings.teacher,
                self.policy.vocab_size,
                self.settings.algorithm.loss.teacher_top_k,
                asked,
            )
            if self.settings.teacher
            else None,
            memory=self.memory,
        )

    def start(self) -> "Harness":
        """Returns when the checkpoint of the first version is written."""
        self.trainer.start()
        self.writer.submit(lambda: None).exception()
        return self

    def restart(self) -> "Harness":
        successor = Harness(self.root, self.settings, self.stream, self.gateway, closing=self.closing)
        return successor.start()

    def step(self, group_id: str, **fields: Any) -> None:
        """Train one step on one new group."""
        self.agents.group(group_id, [1.0, 0.0], **fields)
        assert self.trainer.run_once()

    def save(self) -> None:
        """Save a checkpoint, as `POST /checkpoint` does, without training."""
        asked = self.shared_state.request_checkpoint()
        self.shared_state.pause()
        self.trainer.run_once()
        self.shared_state.resume()
        asked.result(0)

    def door(self) -> TestClient:
        """The trainer's REST API, for an operator."""
        keys, registry = Keyring([], ["admin"]), CollectorRegistry()
        app = create_app(self.shared_state, self.checkpoints.ledger, self.store, keys, registry)
        return TestClient(app, headers={"x-api-key": "admin"})

    def sleepless(self) -> None:
        """From now on, pauses take no time, so that a paused trainer goes on looking at once."""
        self.shared_state.sleep = lambda seconds: None  # type: ignore[method-assign]

    @property
    def told(self) -> dict[str, float]:
        """The metrics of the last step."""
        return self.shared_state.snapshot.metrics

    @property
    def waits_for(self) -> str:
        return self.shared_state.snapshot.waiting_for

    def sample(self, name: str, **labels: str) -> float | None:
        """A value that Prometheus gets."""
        value: float | None = self.registry.get_sample_value(f"weir_trainer_{name}", labels)
        return value

    @property
    def pending(self) -> list[Entry]:
        """The delivered entries that are not acknowledged."""
        return list(self.stream.reclaim())

    @property
    def ledger(self) -> list[LedgerStep]:
        """The first steps that a checkpoint contains."""
        return self.checkpoints.ledger(0, 100)

    def verdict(self, session_id: str) -> Verdict:
        verdict = self.stream.heads[session_id].verdict
        assert verdict is not None, session_id
        return verdict

    def weights(self) -> dict[str, torch.Tensor]:
        state = self.policy.module.state_dict()
        return {name: tensor.clone() for name, tensor in state.items()}

    def session_codes(self) -> dict[str, str | None]:
        return {s: head.verdict.code if head.verdict else None for s, head in self.stream.heads.items()}


MakeHarness = Callable[..., Harness]
