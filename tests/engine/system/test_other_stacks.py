"""The whole loop with adapters, with tensors that the trainer sends, with an engine without tokenizer."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.system.real_system import System, running_system, system_settings
from tests.support.tolerances import ulps
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long


@pytest.fixture
def adapted(tiny_model: Path, tmp_path: Path) -> Iterator[System]:
    """Only adapters are trained, published, and loaded by the engine."""
    lora = {"max_rank": 8, "max_loaded": 4, "max_per_batch": 4}
    settings = system_settings(tmp_path, tiny_model, lora=lora)
    trained = {"lora": {"rank": 8}, "transport": "adapter", "optimizer": {"lr": 1e-2, "warmup_steps": 0}}
    settings.services["trainer"] |= trained
    with running_system(settings) as system:
        yield system


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


@pytest.fixture
def sending(tiny_model: Path, tmp_path: Path) -> Iterator[System]:
    """The trainer sends tensors to the engine, in a process group with it."""
    settings = system_settings(tmp_path, tiny_model)
    settings.services["trainer"] |= {"transport": "collective"}
    with running_system(settings) as system:
        yield system


def test_versions_reach_the_engine_without_files(sending: System, tiny_model: Path) -> None:
    system = sending
    for _ in range(3):
        before = system.serving()
        system.train_one_group()
        wait_until(lambda: system.serving() > before)  # noqa: B023 - called in the same iteration
        engine = system.get("/model_info", url=system.engine_url)
        assert engine["weight_version"] == str(system.serving())
        # After a load of files, it would be their directory.
        assert Path(engine["model_path"]) == tiny_model.absolute()
    metrics = system.trainer("/status")["metrics"]
    assert metrics["mismatch/abs_logp"] < 1e-4, "the engine samples with the weights that the trainer has"


@pytest.fixture(scope="module")
def bare(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The engine gets ids and sends ids; the gateway does the rest."""
    directory = tmp_path_factory.mktemp("bare")
    with running_system(
        system_settings(directory, tiny_model, engine_args=["--skip-tokenizer-init"])
    ) as system:
        yield system


def said(system: System, ticket: Any, **more: Any) -> tuple[str, str]:
    """The text of an answer, and why it ended. Without randomness, equal calls get equal answers."""
    reply = system.say(ticket, "tell me", temperature=0, max_tokens=64, **more)
    (choice,) = reply.choices
    return choice.message.content or "", choice.finish_reason


def test_its_answers_are_read_and_end_at_stop_strings(bare: System) -> None:
    ticket = bare.post("/sessions", {"train": False})
    whole, _ = said(bare, ticket)
    stop = whole[12:15]
    assert len(stop) == 3
    for _ in range(2):  # the first call finds out that the engine has no tokenizer
        cut, finish = said(bare, ticket, stop=[stop])
        assert (cut, finish) == (whole[: whole.index(stop)], "stop")
    chunks = list(bare.say(ticket, "tell me", temperature=0, max_tokens=64, stop=[stop], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == cut
    turns = bare.get(f"/sessions/{ticket['session_id']}?tokens=true")["turns"]
    shortest = min(turns, key=lambda turn: len(turn["output_ids"]))
    longest = max(turns, key=lambda turn: len(turn["output_ids"]))
    length = len(shortest["output_ids"])
    assert shortest["output_ids"] == longest["output_ids"][:length], "the record ends with the stop string"
    assert len(shortest["logprobs"]) == length


def test_what_needs_its_tokenizer_is_refused_by_name(bare: System) -> None:
    ticket = bare.post("/sessions", {"train": False})
    with pytest.raises(openai.BadRequestError, match=r"structural_tag.* is not supported"):
        bare.say(ticket, "tell me", response_format={"type": "json_object"})


def test_its_answers_are_trained_and_it_takes_the_new_weights(bare: System) -> None:
    bare.train_one_group()
    wait_until(lambda: bare.serving() > 0, 300)
