"""The system of `test_protocol`: a gateway and a trainer on a real Redis. The trainer can be killed.

Everything is real except the gateway's HTTP and the weights. The weights are a list of the turns on which
they were trained. A process that is killed leaves Redis and the disk as they are at that moment.
"""

import asyncio
import struct
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
from prometheus_client import CollectorRegistry

from rollout_queue import clock
from rollout_queue.clock import Clock
from rollout_queue.contract.packed_tokens import TrainedTokens
from rollout_queue.contract.stream import Entry, Verdicts
from rollout_queue.redis import key_names
from rollout_queue.redis.lease import Lease
from rollout_queue.redis.session_deletion import StreamDeleter
from rollout_queue.redis.stream_reader import StreamReader
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.redis_clients import async_redis_at, redis_at
from tests.support.trainer_service.harness import FakeGateway
from tests.support.trainer_service.publications import InlineExecutor, LateExecutor, OneTensor
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.heartbeat import Heartbeat
from trainer_service.intake import Intake
from trainer_service.model.checkpoint_layout import Layout
from trainer_service.publishing.gateway_client import GatewayClient
from trainer_service.publishing.places import DiskPlace
from trainer_service.publishing.publisher import Publisher
from trainer_service.settings import TrainerSettings
from trainer_service.shared_state import SharedState
from trainer_service.step.step_parts import StepRequest, TurnRecord
from trainer_service.storage.checkpoint import CURRENT, Checkpoints, Unwritten
from trainer_service.storage.policy_store import PolicyStore
from trainer_service.storage.run_state import LedgerStep
from trainer_service.train import Trainer
from trainer_service.trainer_metrics import TrainerMetrics

SHARD = "weights.json"
CUTS = (
    "read",
    "read: done",
    "step",
    "step: done",
    "shards",
    "shards: done",
    "CURRENT",
    "CURRENT: done",
    "announce",
    "announce: done",
    "acknowledge",
    "acknowledge: done",
)
"""Where a trainer can be killed: before and after each change that another process can see."""
CALM = ("read", "read: done", "step", "step: done", "CURRENT: done", "acknowledge", "acknowledge: done")
"""Where a trainer may sleep while another takes over. At the other places it holds a lock on its disk."""

Result = TypeVar("Result")


class Killed(BaseException):
    """Stands for SIGKILL inside the test's own process."""


class Knife:
    """Runs an action once, when the trainer reaches a place."""

    def __init__(self) -> None:
        self._place = ""
        self._act: Callable[[], None] = lambda: None

    @contextmanager
    def ready(self, place: str, act: Callable[[], None]) -> Iterator[None]:
        self._place, self._act = place, act
        try:
            yield
        finally:
            self._place = ""

    def at(self, place: str) -> None:
        if place == self._place:
            self._place = ""
            self._act()


class Weights:
    """A policy whose weights are the turns that made them."""

    vocab_size, data_ranks, shares_prefixes = 1000, 1, False
    layout = Layout(ranks=1, zero_stage=1, dtype="float32")
    model_checks = ()

    def __init__(self, knife: Knife) -> None:
        self.trained: list[str] = []
        self.begun: list[str] = []
        """The turns whose gradients are accumulated, and which no step contains yet."""
        self.records: list[TurnRecord] = []
        """Of the last step's turns: the advantage of a turn is its place in `trained`."""
        self._sessions: dict[str, str] = {}
        self.knife = knife

    def copy_states(self) -> "CopiedWeights":
        return CopiedWeights(self.trained[:], self.knife)

    def load(self, directory: Path, tag: str, layout: Layout | None, rate_scale: float = 1.0) -> None:
        self.trained = msgspec.json.decode((directory / tag / SHARD).read_bytes(), type=list[str])

    def snapshot(self) -> OneTensor:
        return OneTensor("trained", len(self.trained))

    def weights_are_finite(self) -> bool:
        return True

    def gradient_is_finite(self, request: StepRequest) -> bool:
        return True

    def accumulate(self, request: StepRequest) -> None:
        self.begun += self._turns(request)

    def discard_gradients(self) -> None:
        self.begun = []

    def optimise(self, request: StepRequest) -> dict[str, float]:
        self.knife.at("step")
        first, learned = len(self.trained), [*self.begun, *self._turns(request)]
        self.trained += learned
        self.begun = []
        self.records = [
            TurnRecord(self._sessions[turn_id], turn_id, TrainedTokens(2, struct.pack("<f", place)).pack())
            for place, turn_id in enumerate(learned, first)
        ]
        self.knife.at("step: done")
        tokens = float(sum(row.mask_L.sum() for row in request.rows))
        agreed = {"mismatch/abs_logp": 0.0, "mismatch/kl": 0.0}
        return {"grad_norm": 1.0, "tokens": tokens, "epochs": 1.0, **agreed}

    def _turns(self, request: StepRequest) -> list[str]:
        self._sessions |= {turn_id: row.session_id for row in request.rows for turn_id in row.turn_ids}
        return [turn_id for row in request.rows for turn_id in row.turn_ids]


@dataclass(frozen=True)
class CopiedWeights:
    """The weights at the moment of a checkpoint."""

    trained: Sequence[str]
    knife: Knife

    def write(self, directory: Path) -> None:
        self.knife.at("shards")
        directory.mkdir()
        (directory / SHARD).write_bytes(msgspec.json.encode(self.trained))
        self.knife.at("shards: done")


class CutReader(StreamReader):
    """The reader of a trainer that can be killed before and after each read and acknowledgement."""

    knife: Knife

    def read(self, count: int, block_s: float) -> Sequence[Entry]:
        self.knife.at("read")
        entries = super().read(count, block_s)
        self.knife.at("read: done")
        return entries

    def acknowledge(self, entry_ids: Sequence[str], verdicts: Verdicts) -> None:
        self.knife.at("acknowledge")
        super().acknowledge(entry_ids, verdicts)
        self.knife.at("acknowledge: done")


class CutCheckpoints(Checkpoints):
    """Checkpoints of a trainer that can be killed after a save."""

    knife: Knife

    def write(self, unwritten: Unwritten, confirm: Callable[[], None] = lambda: None) -> str:
        tag = super().write(unwritten, confirm)
        self.knife.at("CURRENT: done")
        return tag


class CountedSeconds(Clock):
    """A clock that is the same in each replay of a history: each look at it takes a second."""

    def __init__(self) -> None:
        self._seconds = count()

    def monotonic(self) -> float:
        return next(self._seconds)


class ReplayedTrainer(Trainer):
    def start(self) -> None:
        self._clock = CountedSeconds()
        with clock.using(self._clock):
            super().start()

    def run_once(self) -> bool:
        with clock.using(self._clock):
            return super().run_once()


class System:
    """One gateway and one trainer."""

    def __init__(
        self, url: str, knife: Knife, folder: Path, checkpoint_every_steps: int | None, looks: int
    ) -> None:
        """A checkpoint is written when the trainer has looked for its end `looks` times."""
        self._looks = looks
        self.knife, self.folder = knife, folder
        self.redis = redis_at(url)
        self.redis.flushdb()
        self._runner = asyncio.Runner()
        self.async_redis = async_redis_at(url)
        self.writer = StreamWriter(self.async_redis)
        self.deleter = StreamDeleter(self.async_redis)
        self.fleet = FakeGateway()
        transport = httpx.MockTransport(self._answer)
        self._client = httpx.Client(base_url="http://gateway", transport=transport, trust_env=False)
        self.settings = TrainerSettings(
            model_path=folder,
            checkpoint_dir=folder / "checkpoints",
            policies_dir=folder / "policies",
            checkpoint_every_steps=checkpoint_every_steps,
            retry_s=0.001,
        )
        self.start_trainer()

    def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(call)

    def close(self) -> None:
        self.run(self.writer.close())
        self.run(self.async_redis.aclose())
        self._runner.close()
        self._client.close()
        self.redis.close()

    def restart_gateway(self) -> None:
        self.run(self.writer.close())
        self.writer = StreamWriter(self.async_redis)

    def start_trainer(self, group_wait_s: float = 1e12) -> None:
        """Start a new process on the same disk. The former holder of the lease is dead, or slept too long."""
        algorithm = AlgorithmSettings(min_live_rows=2, max_tokens=8, group_wait_s=group_wait_s)
        self.redis.delete(key_names.LEASE)
        lease = Lease(self.redis, 1000.0)
        assert lease.claim() is None
        stream = CutReader(self.redis, lease.token)
        checkpoints = CutCheckpoints(
            self.settings.checkpoint_dir, self.settings.keep_checkpoints, LateExecutor(self._looks)
        )
        stream.knife = checkpoints.knife = self.knife
        self.weights, self.shared_state, metrics = (
            Weights(self.knife),
            SharedState(),
            TrainerMetrics(CollectorRegistry()),
        )
        heartbeat = Heartbeat(stream, self.shared_state, self.settings.retry_s)
        store = PolicyStore(self.settings.policies_dir, self.folder, self.settings.keep_policies)
        gateway = GatewayClient(self._client, self.settings.push_timeout_s)
        self.trainer = ReplayedTrainer(
            settings=self.settings.model_copy(update={"algorithm": algorithm}),
            policy=self.weights,  # type: ignore[arg-type]
            intake=Intake(stream, algorithm, Weights.vocab_size, heartbeat, metrics),
            checkpoints=checkpoints,
            publisher=Publisher(
                store, gateway, stream, DiskPlace(store), heartbeat, metrics, InlineExecutor()
            ),
            metrics=metrics,
            shared_state=self.shared_state,
            heartbeat=heartbeat,
        )
        self.trainer.start()

    def durable(self) -> tuple[list[str], list[LedgerStep]]:
        """The turns in the weights that a new trainer would restore, and the steps in its ledger."""
        directory = self.settings.checkpoint_dir
        if not (directory / CURRENT).exists():
            return [], []
        weights, checkpoints = Weights(Knife()), Checkpoints(directory, self.settings.keep_checkpoints)
        checkpoints.restore(weights)
        return weights.trained, checkpoints.ledger(since=0, limit=10**6)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.method != "POST":
            return self.fleet(request)
        self.knife.at("announce")
        reply = self.fleet(request)
        self.knife.at("announce: done")
        return reply
