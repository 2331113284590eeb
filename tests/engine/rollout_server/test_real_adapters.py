"""Adapters in the real SGLang: it samples with one what merged weights give, and calls keep theirs."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.rollout_server.real_server import REAL_ENGINE, Running, real_server
from tests.support.rollout_server.weights import WEIGHTS, publish

pytestmark = [*REAL_ENGINE, pytest.mark.long]

RANK, ALPHA = 4, 8.0
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
ENGINE_TOLERANCE = 2e-4
"""Between an adapter and merged weights, in nats a token: other orders of float32 sums."""


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    lora = {"max_rank": 8, "max_loaded": 3, "max_per_batch": 3}
    with real_server(tmp_path_factory.mktemp("adapters"), tiny_model, lora=lora) as server:
        yield server


def factors_of(model: Path, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A random adapter: both factors of every adapted layer."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in load_file(model / WEIGHTS).items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in MODULES:
            a = torch.randn(RANK, weight.shape[1], generator=generator) * 0.2
            b = torch.randn(weight.shape[0], RANK, generator=generator) * 0.2
            found[layer] = (a, b)
    return found


def publish_adapter(running: Running, model: Path, version: int) -> Path:
    directory = running.directory / "run" / "policies" / f"adapter{version}"
    directory.mkdir(parents=True)
    tensors = {}
    for layer, (a, b) in factors_of(model, version).items():
        tensors[f"base_model.model.{layer}.lora_A.weight"] = a
        tensors[f"base_model.model.{layer}.lora_B.weight"] = b
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(MODULES)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    publish(directory, version)
    return directory


def publish_merged(running: Running, model: Path, seed: int, version: int) -> Path:
    """The weights of the model with the adapter added, as a whole version."""
    directory = running.version(version)
    weights = load_file(model / WEIGHTS)
    for layer, (a, b) in factors_of(model, seed).items():
        weights[f"{layer}.weight"] += ALPHA / RANK * (b @ a)
    save_file(weights, directory / WEIGHTS, {"format": "pt"})
    publish(directory, version)
    return directory


def logprobs(running: Running, adapter: str | None, ids: list[int] = PROMPT) -> torch.Tensor:
    body: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if adapter is not None:
        body["lora_path"] = adapter
    answer = running.engine.post("/generate", json=body).json()
    return torch.tensor([each[0] for each in answer["meta_info"]["input_token_logprobs"][1:]])


def served_adapter(running: Running) -> str:
    return str(running.status()["adapters"][-1]["name"])


def test_an_adapter_gives_the_logprobs_of_merged_weights(running: Running, tiny_model: Path) -> None:
    base = logprobs(running, None)
    answer = running.reload(1, publish_adapter(running, tiny_model, 1))
    assert answer.status_code == 200, answer.text
    assert answer.json()["paused_s"] == 0.0
    adapted = logprobs(running, served_adapter(running))
    assert (adapted - base).abs().max() > 100 * ENGINE_TOLERANCE
    assert torch.equal(logprobs(running, None), base)
    merged = running.reload(2, publish_merged(running, tiny_model, 1, 2))
    assert merged.status_code == 200, merged.text
    assert running.status()["adapters"] == []
    assert (logprobs(running, None) - adapted).abs().max() < ENGINE_TOLERANCE


def test_a_call_that_runs_keeps_its_adapter_while_a_newer_one_is_loaded(
    running: Running, tiny_model: Path
) -> None:
    assert running.reload(3, publish_adapter(running, tiny_model, 3)).status_code == 200
    former = served_adapter(running)
    answers: list[dict[str, Any]] = []

    def call() -> None:
        sampling = {"max_new_tokens": 400, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "lora_path": former}
        answers.append(running.engine.post("/generate", json=body).json())

    thread = threading.Thread(target=call)
    thread.start()
    while running.status()["running"] == 0 and thread.is_alive():
        pass
    assert running.reload(4, publish_adapter(running, tiny_model, 4)).status_code == 200
    assert thread.is_alive(), "the call ended before the newer adapter was loaded"
    thread.join()
    (answer,) = answers
    sampled = torch.tensor([each[0] for each in answer["meta_info"]["output_token_logprobs"]])
    scored = logprobs(running, former, [*PROMPT, *answer["output_ids"]])[len(PROMPT) - 1 :]
    assert (sampled - scored).abs().max() < ENGINE_TOLERANCE


def test_calls_of_one_batch_each_have_their_adapter(running: Running, tiny_model: Path) -> None:
    """Also for the first token: a prefill computes the head for the last token of each prompt only, unless
    the log-probabilities of prompts are asked for or the prompts are in the cache."""
    for version in (5, 6):
        assert running.reload(version, publish_adapter(running, tiny_model, version)).status_code == 200
    first, second = (str(each["name"]) for each in running.status()["adapters"][-2:])
    prompts = [PROMPT[:5], PROMPT, PROMPT[3:], PROMPT[1:7]]
    callers = [first, None, second, first]
    for start in (-1, 0):
        sampling = {"max_new_tokens": 2, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompts, "lora_path": callers, "sampling_params": sampling}
        body |= {"return_logprob": True, "logprob_start_len": start}
        answers = running.engine.post("/generate", json=body).json()
        for ids, caller, answer in zip(prompts, callers, answers, strict=True):
            told = answer["meta_info"]
            seen = [*(told["input_token_logprobs"] if start == 0 else [])[1:], *told["output_token_logprobs"]]
            alone = logprobs(running, caller, [*ids, *answer["output_ids"]])
            assert [each[0] for each in seen] == pytest.approx(
                alone[-len(seen) :].tolist(), abs=ENGINE_TOLERANCE
            )


def test_an_adapter_that_the_engine_has_dropped_is_read_again(running: Running, tiny_model: Path) -> None:
    first = served_adapter(running)
    before = logprobs(running, first)
    for version in (7, 8):
        assert running.reload(version, publish_adapter(running, tiny_model, version)).status_code == 200
        logprobs(running, served_adapter(running))
    assert torch.allclose(logprobs(running, first), before, atol=ENGINE_TOLERANCE)


def test_an_engine_that_is_killed_comes_back_with_its_adapter(running: Running) -> None:
    name, restarts = served_adapter(running), running.status()["restarts"]
    before = logprobs(running, name)
    os.kill(running.engine_pid(), signal.SIGKILL)
    running.until_ready(restarts + 1)
    assert served_adapter(running) == name
    assert torch.allclose(logprobs(running, name), before, atol=ENGINE_TOLERANCE)
    assert running.served() == "0"


def test_an_adapter_of_too_high_a_rank_is_refused(running: Running, tiny_model: Path) -> None:
    served = running.status()["version"]
    directory = publish_adapter(running, tiny_model, 9)
    config = (directory / "adapter_config.json").read_text().replace('"r": 4', '"r": 9')
    (directory / "adapter_config.json").write_text(config)
    publish(directory, 9)
    answer = running.reload(9, directory)
    assert (answer.status_code, "max_rank" in answer.text) == (422, True)
    assert running.status()["version"] == served
