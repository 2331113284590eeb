"""A trainer by commands in the test's own process, on a log in memory."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from safetensors.torch import load_file

from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.trainer_commands import (
    Command,
    CreateModel,
    Datum,
    ForwardBackward,
    LoraSpec,
    OptimStep,
    Passed,
    Published,
    Result,
)
from tests.support.queue.memory_stream import MemoryStream
from tests.support.trainer_service.command_log import MemoryCommandLog
from tests.support.trainer_service.device import ON_DEVICE
from tests.support.trainer_service.publications import InlineExecutor
from tests.support.trainer_service.random_rows import VOCABULARY
from tests.support.trainer_service.same_training import Weights
from trainer_service.commands.command_trainer import CommandTrainer
from trainer_service.commands.model_ranks import ModelRanks
from trainer_service.commands.sampler_weights import SamplerWeights, WrittenAdapter
from trainer_service.heartbeat import Heartbeat
from trainer_service.model.trained_models import Models
from trainer_service.publishing.places import DiskPlace, PolicyPlace
from trainer_service.settings import TrainerSettings
from trainer_service.shared_state import SharedState
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.durable_files import DiskRetry
from trainer_service.storage.policy_store import PolicyStore
from trainer_service.trainer_metrics import TrainerMetrics

MakeCommandHarness = Callable[..., "CommandHarness"]
BASE = "base"
"""The name by which commands call the base model."""


class CommandHarness:
    """One trainer. Another one on the same directory and log continues as after a crash of this one."""

    def __init__(self, root: Path, settings: TrainerSettings, log: MemoryCommandLog) -> None:
        self.root, self.settings, self.log = root, settings, log
        self.shared_state = SharedState()
        self.adapters: list[WrittenAdapter] = []
        """Every adapter that was published."""
        metrics = TrainerMetrics(CollectorRegistry())
        heartbeat = Heartbeat(MemoryStream(), self.shared_state, retry_s=0.01)
        self.ranks = ModelRanks(Models(settings))
        disk = DiskRetry(heartbeat, metrics, "publishing", "publish")
        self.forgotten: list[tuple[str, int]] = []
        """Every adapter that engines were to forget."""
        self.trainer = CommandTrainer(
            settings=settings,
            ranks=self.ranks,
            reader=log,
            sampler=SamplerWeights(
                self.ranks, self.store_of, self.adapters.append, self._publish, disk, self._forget
            ),
            checkpoints=Checkpoints(settings.checkpoint_dir, 2, InlineExecutor()),
            metrics=metrics,
            shared_state=self.shared_state,
            heartbeat=heartbeat,
        )
        self.versions: list[Weights] = []
        """The weights of each version of the fleet's policy that was published."""
        self.trainer.start()

    def store_of(self, name: str) -> tuple[PolicyStore, PolicyPlace]:
        store = PolicyStore(self.settings.policies_dir / "adapters" / name, self.settings.model_path, 4)
        return store, DiskPlace(store)

    def _forget(self, name: str, version: int) -> None:
        self.forgotten.append((name, version))

    def _publish(self, ranks: ModelRanks, model_id: str, step: int) -> Published:
        path = self.root / f"version-{len(self.versions)}"
        path.mkdir()
        ranks.snapshot(model_id).write(path)
        self.versions.append(load_file(path / "model.safetensors"))
        return Published("", len(self.versions), str(path))

    @property
    def is_idle(self) -> bool:
        """Whether every command has a result."""
        return all(self.log.answered([each.request_id for each in self.log.kept]))

    def send(self, model_id: str, command: Command) -> Result:
        """Have a command carried out, and everything before it in the log."""
        request_id = self.log.append(model_id, command)
        self.trainer.run_once()
        return self.log.last(request_id)

    def passed(self, model_id: str, command: Command) -> Passed:
        result = self.send(model_id, command)
        assert isinstance(result, Passed), result
        return result

    def make_step(self, model_id: str, *more: Command) -> Result:
        """Have a model made, one step of it, and further commands. Returns the last result."""
        return [self.send(model_id, each) for each in (created(), learn(1), step(), *more)][-1]

    def weights(self, model_id: str) -> Weights:
        """The present weights of a model: those of its adapter, or all."""
        path = self.root / "weights-of-a-moment"
        path.mkdir(exist_ok=True)
        self.ranks.snapshot(model_id).write(path)
        (file,) = path.glob("*.safetensors")
        weights: Weights = load_file(file)
        file.unlink()
        return weights

    def stop(self) -> None:
        """Save, as a trainer does that is told to stop."""
        self.trainer.save_if_outdated()


def command_settings(root: Path, model_path: Path, **given: Any) -> TrainerSettings:
    settings: dict[str, Any] = {
        "source": "commands",
        "base_models": [BASE],
        "model_path": model_path,
        "checkpoint_dir": root / "checkpoints",
        "policies_dir": root / "policies",
        "metrics_path": None,
        "threads": 1,
        **ON_DEVICE,
        "checkpoint_every_steps": 1_000_000,
        "algorithm": {"max_tokens": 64},
    }
    return TrainerSettings(**(settings | given))


def created(rank: int = 4, seed: int = 1, **chosen: bool) -> CreateModel:
    return CreateModel(BASE, LoraSpec(rank, seed, **chosen))


FULL = CreateModel(BASE, None)


def step(learning_rate: float = 1e-2, **given: float) -> OptimStep:
    rates = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
    return OptimStep(learning_rate, **(rates | given))


def datum(tokens: Sequence[int], targets: Sequence[int], k: int = 1, **numbers: Sequence[float]) -> Datum:
    return Datum(
        TokenIds(tokens), TokenIds(targets), k, {name: Logprobs(each) for name, each in numbers.items()}
    )


def random_datum(seed: int, names: Sequence[str] = ("weights",), length: int = 9, k: int = 1) -> Datum:
    """A datum whose last target is beyond its tokens, with numbers of both signs."""
    draw = random.Random(seed)
    ids = [draw.randrange(VOCABULARY) for _ in range(length + 1)]
    targets = ids[1:] if k == 1 else [draw.randrange(VOCABULARY) for _ in range(length * k)]
    numbers = {
        "weights": [draw.uniform(-1, 1) for _ in targets],
        "advantages": [draw.uniform(-1, 1) for _ in targets],
        "logprobs": [draw.uniform(-6, -4) for _ in targets],  # log p of an untrained model is about -5
        "sequence_ratio_mask": [float(at > length // 2) for at, _ in enumerate(targets)],
    }
    return datum(ids[:length], targets, k, **{name: numbers[name] for name in names})


def learn(*seeds: int, forward_only: bool = False) -> ForwardBackward:
    """A pass of cross-entropy over random datums of different lengths."""
    data = tuple(random_datum(seed, length=4 + seed % 7) for seed in seeds)
    return ForwardBackward("cross_entropy", {}, data, forward_only)
