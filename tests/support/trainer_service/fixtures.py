"""Fixtures of the trainer's tests: a tiny model, and a trainer around it."""

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.queue.memory_stream import MemoryStream
from tests.support.trainer_service.command_harness import CommandHarness, MakeCommandHarness, command_settings
from tests.support.trainer_service.command_log import MemoryCommandLog
from tests.support.trainer_service.conversion import convert_here
from tests.support.trainer_service.device import ON_DEVICE, SPARING
from tests.support.trainer_service.harness import FakeGateway, Harness, MakeHarness
from tests.support.trainer_service.publications import InlineExecutor
from tests.support.trainer_service.random_rows import VOCABULARY, MakeLearner, OneRankLearner, random_rows
from tests.support.trainer_service.rank_pair import RankPair, rank_pair
from tests.support.trainer_service.same_training import Weights
from trainer_service.model import checkpoint_layout
from trainer_service.model.deepspeed_policy import DeepSpeedPolicy
from trainer_service.settings import TrainerSettings
from trainer_service.sinks import Sink
from trainer_service.step.ranks import DistributedPolicy
from trainer_service.step.step_parts import StepRequest


@pytest.fixture(autouse=True)
def converted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert checkpoints in the test's process. The import of DeepSpeed would take a new one seconds."""
    monkeypatch.setattr(checkpoint_layout, "run_converter", convert_here)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPair]:
    """Two ranks, started once for all tests of this process."""
    with rank_pair(tmp_path_factory.mktemp("pair")) as ranks:
        yield ranks
        assert ranks.close() == 0


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory: Path = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(7)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def untrained(model_path: Path) -> Weights:
    """The weights with which every training begins."""
    weights: Weights = load_file(model_path / "model.safetensors")
    return weights


@pytest.fixture(scope="session")
def imported(model_path: Path) -> None:
    """Import everything that a policy needs, and exempt these objects from garbage collection. Torch and
    transformers have a million of them."""
    gc.freeze()  # DeepSpeed collects garbage whenever it makes a policy of stage 3
    settings = TrainerSettings(model_path=model_path, threads=1, zero_stage=3, **ON_DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SPARING.items():
            patch.setenv(name, value)
        DistributedPolicy(DeepSpeedPolicy(settings)).optimise(
            StepRequest(random_rows(0, 1), 0, settings.algorithm)
        )
    gc.collect()
    gc.freeze()


@pytest.fixture
def make_harness(tmp_path: Path, model_path: Path, imported: None) -> Iterator[MakeHarness]:
    def make(
        name: str = "run",
        stream: MemoryStream | None = None,
        sinks: Sequence[Sink] = (),
        executor: Executor | None = None,
        writer: Executor | None = None,
        **settings: Any,
    ) -> Harness:
        root = tmp_path / name
        algorithm = {"min_live_rows": 2, "flush_after_s": None, "group_wait_s": 1e12}
        # The logprobs in these tests are invented, so that these guards would always alarm.
        guards = {"max_abs_logp": None, "max_kl": None}
        given: dict[str, Any] = {
            "model_path": model_path,
            "checkpoint_dir": root / "checkpoints",
            "policies_dir": root / "policies",
            "metrics_path": root / "metrics.jsonl",
            "threads": 1,
            **ON_DEVICE,
            "retry_s": 0.01,
            "checkpoint_every_steps": 1,
            "optimizer": {"lr": 1e-2, "warmup_steps": 0},
        }
        given["guards"] = guards | settings.pop("guards", {})
        given["algorithm"] = algorithm | settings.pop("algorithm", {})
        configured = TrainerSettings(**(given | settings))
        return Harness(
            root,
            configured,
            stream or MemoryStream(),
            FakeGateway(),
            sinks=sinks,
            executor=executor or InlineExecutor(),
            writer=writer or InlineExecutor(),
            closing=closing,
        )

    with ExitStack() as closing:
        yield make


@pytest.fixture
def harness(make_harness: MakeHarness) -> Harness:
    return make_harness().start()


@pytest.fixture
def make_learner(tmp_path: Path, model_path: Path, imported: None) -> MakeLearner:
    def make(**settings: Any) -> OneRankLearner:
        given: dict[str, Any] = {
            "model_path": model_path,
            "threads": 1,
            **ON_DEVICE,
            "optimizer": {"lr": 1e-2, "warmup_steps": 0},
            "algorithm": {"max_tokens": 64},
        }
        return OneRankLearner(tmp_path, TrainerSettings(**(given | settings)))

    return make


@pytest.fixture
def make_command_harness(tmp_path: Path, model_path: Path, imported: None) -> MakeCommandHarness:
    """Makes trainers by commands. Those with the same name have the same directory."""

    def make(
        name: str = "run", log: MemoryCommandLog | None = None, base: Path = model_path, **settings: Any
    ) -> CommandHarness:
        root = tmp_path / name
        root.mkdir(exist_ok=True)
        return CommandHarness(root, command_settings(root, base, **settings), log or MemoryCommandLog())

    return make
