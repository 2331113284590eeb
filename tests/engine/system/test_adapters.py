"""The whole loop with adapters: only the adapter is trained, published, and loaded by the real engine."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.system.real_system import System, system_settings
from tests.support.tolerances import ulps
from tests.support.waiting import wait_until
from weir.stack.stack import Stack

pytestmark = pytest.mark.long


@pytest.fixture
def adapted(tiny_model: Path, tmp_path: Path) -> Iterator[System]:
    settings = system_settings(
        tmp_path, tiny_model, lora={"max_rank": 8, "max_loaded": 4, "max_per_batch": 4}
    )
    trained = {"lora": {"rank": 8}, "transport": "adapter", "optimizer": {"lr": 1e-2, "warmup_steps": 0}}
    settings.services["trainer"] |= trained
    with Stack(settings) as stack:
        stack.wait_ready(timeout_s=1200)
        yield System(stack, settings)


def test_adapters_are_trained_published_and_sampled_and_trainer_and_engine_agree(adapted: System) -> None:
    system = adapted
    sessions: list[str] = []
    for step in (1, 2):
        before = system.serving()
        sessions += system.train_one_group(size=8)
        wait_until(lambda: system.serving() > before)  # noqa: B023 - called in the same iteration
        status = system.trainer("/status")
        assert status["step"] == step
        # The log-probabilities are near -ln 1024, and each comes from float32 sums of at most 128 products.
        # The second step compares tokens that the engine sampled with the adapter of the first.
        assert status["metrics"]["mismatch/abs_logp"] <= ulps(128, of=math.log(1024))
    rollout = system.rollout()
    assert [each["version"] for each in rollout["adapters"] if each["name"]] == [1, 2]
    assert system.get("/model_info", url=system.engine_url)["weight_version"] == "0"
    assert versions_of(system, "policy@1") == {1}
    assert versions_of(system, "policy") == {2}
    assert sampled_versions(system, sessions) == {0, 1}


def versions_of(system: System, model: str) -> set[int]:
    """The versions that answer a call to this model."""
    ticket = system.post("/sessions", {"train": False})
    messages: list[Any] = [{"role": "user", "content": "again"}]
    system.client(ticket).chat.completions.create(model=model, messages=messages, max_tokens=8)
    return sampled_versions(system, [ticket["session_id"]])


def sampled_versions(system: System, sessions: list[str]) -> set[int]:
    found = [system.get(f"/sessions/{name}") for name in sessions]
    return {span["version"] for each in found for turn in each["turns"] for span in turn["versions"]}
