"""Adapters: a version may be a LoRA adapter, which the engine loads beside the weights that it has."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.rollout_server.adapters import LORA, adapter, factors, names, whole_weights, with_layers
from tests.support.rollout_server.harness import Harness


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    async with with_layers(tmp_path, lora=LORA).started() as harness:
        yield harness


async def test_an_adapter_is_loaded_without_a_pause_and_under_a_name_of_its_own(harness: Harness) -> None:
    harness.engine.calls.clear()
    answer = await harness.reload(1, adapter(harness, 1))
    assert (answer.status_code, answer.json()["paused_s"]) == (200, 0.0), answer.text
    assert answer.json()["seconds"]["load"] > 0
    assert "/pause_generation" not in harness.engine.calls
    assert "/update_weights_from_disk" not in harness.engine.calls
    status = await harness.status()
    assert status["version"] == 1
    ((version, name),) = names(status)
    assert (version, list(harness.engine.adapters)) == (1, [name])
    assert harness.engine.version == "0"  # the weights are those of the start


@pytest.mark.parametrize("tied", [False, True])
async def test_the_head_may_have_an_adapter_also_where_it_is_the_embedding(
    tmp_path: Path, tied: bool
) -> None:
    head = "base_model.model.lm_head."
    shapes = {f"{head}lora_A.weight": [4, 2], f"{head}lora_B.weight": [4, 4]}
    async with with_layers(tmp_path, tied, lora=LORA).started() as harness:
        answer = await harness.reload(1, adapter(harness, 1, shapes, target_modules=["lm_head"]))
        assert answer.status_code == 200, answer.text


async def test_a_former_adapter_stays_for_the_calls_that_name_it_until_the_engine_starts_again(
    harness: Harness,
) -> None:
    for version in (1, 2):
        assert (await harness.reload(version, adapter(harness, version))).status_code == 200
    listed = names(await harness.status())
    assert [version for version, _ in listed] == [1, 2]
    assert all(harness.engine.adapters[name].exists() for _, name in listed)
    await harness.kill_engine()
    await harness.until_ready()
    assert harness.engine.boots[-1].version == 0
    assert [version for version, _ in names(await harness.status())] == [2]
    assert (await harness.status())["version"] == 2


async def test_at_most_max_loaded_adapters_are_kept_on_disk(tmp_path: Path) -> None:
    async with with_layers(tmp_path, lora={**LORA, "max_loaded": 2, "max_per_batch": 2}).started() as harness:
        for version in (1, 2, 3, 4):
            assert (await harness.reload(version, adapter(harness, version))).status_code == 200
        assert [version for version, _ in names(await harness.status())] == [3, 4]
        assert harness.kept() == ["v00000003", "v00000004"]


async def test_other_content_under_a_known_number_has_another_name(harness: Harness, tmp_path: Path) -> None:
    assert (await harness.reload(1, adapter(harness, 1))).status_code == 200
    (tmp_path / "policies" / "v1").rename(tmp_path / "policies" / "former")
    again = await harness.reload(1, adapter(harness, 1, fill=2.0), force=True)
    assert again.status_code == 200, again.text
    listed = names(await harness.status())
    assert [version for version, _ in listed] == [1, 1]
    assert len({name for _, name in listed}) == 2


async def test_the_base_is_served_again_without_a_load(harness: Harness) -> None:
    assert (await harness.reload(1, adapter(harness, 1))).status_code == 200
    harness.engine.calls.clear()
    answer = await harness.reload(0, force=True)
    assert answer.status_code == 200, answer.text
    assert (await harness.status())["version"] == 0
    assert "/update_weights_from_disk" not in harness.engine.calls


async def test_whole_weights_end_the_adapters_of_the_others(harness: Harness) -> None:
    assert (await harness.reload(1, adapter(harness, 1))).status_code == 200
    assert (await harness.reload(2, whole_weights(harness, 2))).status_code == 200
    assert names(await harness.status()) == []
    harness.engine.calls.clear()
    # The adapter's own weights are loaded before it.
    assert (await harness.reload(3, adapter(harness, 3))).status_code == 200
    calls = harness.engine.calls
    assert calls.index("/update_weights_from_disk") < calls.index("/load_lora_adapter")
    assert calls.index("/continue_generation") < calls.index("/generate")
    assert (harness.engine.version, (await harness.status())["version"]) == ("0", 3)


async def test_an_adapter_that_the_engine_refuses_leaves_the_former_version(harness: Harness) -> None:
    assert (await harness.reload(1, adapter(harness, 1))).status_code == 200
    harness.engine.refuses_adapters = "rank 4 is incompatible"
    answer = await harness.reload(2, adapter(harness, 2))
    assert (answer.status_code, "rank 4" in answer.json()["error"]["message"]) == (422, True)
    status = await harness.status()
    assert (status["version"], status["restarts"], status["state"]) == (1, 0, "ready")


async def test_an_engine_that_dies_of_an_adapter_comes_back_with_the_former_version(harness: Harness) -> None:
    assert (await harness.reload(1, adapter(harness, 1))).status_code == 200
    harness.engine.dies_with_adapters = True
    assert (await harness.reload(2, adapter(harness, 2))).status_code == 503
    harness.engine.dies_with_adapters = False
    await harness.until_ready()
    assert (await harness.status())["version"] == 1


async def test_a_server_that_takes_no_adapters_says_so(tmp_path: Path) -> None:
    async with with_layers(tmp_path).started() as harness:
        answer = await harness.reload(1, adapter(harness, 1))
        assert answer.status_code == 422
        assert "rollout_server.lora" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("config", "shapes", "says"),
    [
        ({"r": 16}, factors(16, "q_proj", "v_proj"), "max_rank"),
        ({"r": 2}, None, "has shape"),
        ({"use_dora": True}, None, "use_dora"),
        ({"use_rslora": True}, None, "use_rslora"),
        ({"rank_pattern": {"q_proj": 2}}, None, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, None, "modules_to_save"),
        ({"bias": "all"}, None, "bias"),
        ({"peft_type": "IA3"}, None, "peft_type"),
        ({"lora_alpha": 0}, None, "lora_alpha"),
        ({}, factors(4, "q_proj"), "without v_proj"),
        ({}, {**factors(4, "q_proj", "v_proj"), "model.norm.weight": [2]}, "no tensor of a LoRA adapter"),
        ({}, {"base_model.model.model.absent.lora_A.weight": [4, 2]}, "not in the engine's model"),
        ({}, dict(list(factors(4, "q_proj", "v_proj").items())[:3]), "one factor"),
        ({"fill": float("nan")}, None, "NaN"),
    ],
)
async def test_an_adapter_that_the_engine_could_not_apply_is_refused(
    harness: Harness, config: dict[str, Any], shapes: dict[str, list[int]] | None, says: str
) -> None:
    answer = await harness.reload(1, adapter(harness, 1, shapes, **config))
    assert answer.status_code == 422
    assert says in answer.json()["error"]["message"]
    assert "/load_lora_adapter" not in harness.engine.calls
