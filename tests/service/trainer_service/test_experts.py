"""Mixtures of experts: how they are published, how the trainer replays the experts that the engine chose, and
what it measures of the routing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from rollout_queue.contract.records import RoutedExperts, Turn
from rollout_queue.contract.stream import Entry
from tests.support.long_cases import in_turn
from tests.support.trainer_service.device import DEVICE
from tests.support.trainer_service.expert_models import FAMILIES, made_experts
from tests.support.trainer_service.harness import turn
from tests.support.trainer_service.made_rows import rows_of
from tests.support.trainer_service.random_rows import MakeLearner, OneRankLearner, random_rows, with_experts
from trainer_service.groups.episode import Session
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import enable_activation_checkpointing, load_model
from trainer_service.model.packed_attention import packing_of
from trainer_service.model.routers import Routers, RoutersUnknown
from trainer_service.rows.rows import MicroBatch, Row, micro_batches
from trainer_service.step.step_parts import StepRequest

pytestmark = pytest.mark.numeric


def loaded(learner: OneRankLearner, base: Path, directory: Path) -> dict[str, Tensor]:
    """The weights of a model that transformers loads of what the learner publishes."""
    directory.mkdir()
    (directory / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file(learner.exported(), directory / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    return dict(model.state_dict())


@pytest.mark.parametrize(("family", "stage"), in_turn(list(FAMILIES), [1, 3]))
def test_experts_learn_and_are_published_under_the_names_of_their_file(
    make_learner: MakeLearner, tmp_path: Path, family: str, stage: int
) -> None:
    file = made_experts(family, tmp_path / "base")
    learner = make_learner(
        model_path=tmp_path / "base", zero_stage=stage, optimizer={"lr": 1e-2, "warmup_steps": 0}
    )
    first = learner.exported()
    assert first.keys() == file.keys()
    assert all(torch.equal(first[name], file[name]) for name in file)
    learner.learn(1)
    moved = {name for name, value in learner.exported().items() if not torch.equal(value, file[name])}
    assert any("experts" in name for name in moved)
    again = loaded(learner, tmp_path / "base", tmp_path / "published")
    if stage == 1:
        trained = learner.policy.module.state_dict()
        assert all(torch.equal(again[name], value) for name, value in trained.items())


EXPERTS = 4


def packed(rows: list[Row]) -> MicroBatch:
    (batch,) = micro_batches(rows, 10_000)
    return batch


def is_router(module: Any) -> bool:
    return type(module).__name__.lower().endswith("topkrouter")


def model_of(family: str, directory: Path) -> Any:
    made_experts(family, directory)
    return load_model(directory, torch.float32).to(DEVICE)


def chosen(model: Any, batch: MicroBatch) -> np.ndarray[Any, Any]:
    """The experts [N, W] that the model chooses itself, read from what its routers return."""
    layers, top_k = model.config.num_hidden_layers, model.config.num_experts_per_tok
    experts_NLK = np.full((len(batch.ids_N), layers, top_k), -1, np.int16)

    def note(layer: int, outputs: tuple[Tensor, ...]) -> None:
        (indices,) = (each for each in outputs if not each.is_floating_point())
        experts_NLK[:, layer] = indices.cpu().numpy()

    routers = {int(name.split(".")[2]): each for name, each in model.named_modules() if is_router(each)}
    handles = [
        each.register_forward_hook(lambda _, __, outputs, layer=layer: note(layer, outputs))
        for layer, each in routers.items()
    ]
    with torch.no_grad():
        scores(model, batch, packing_of(model), DEVICE)
    for handle in handles:
        handle.remove()
    return experts_NLK.reshape(len(batch.ids_N), -1)


def gradients(model: Any, batch: MicroBatch, routers: Routers | None) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    lp_T, *_ = scores(model, batch, packing_of(model), DEVICE, routers=routers)
    torch.autograd.backward(lp_T.sum())
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return lp_T.detach(), found


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_the_own_choice_changes_no_bit(family: str, tmp_path: Path) -> None:
    model, batch = model_of(family, tmp_path / "base"), packed(random_rows(1, 4))
    own_NW = chosen(model, batch)
    lp_T, of_own = gradients(model, batch, None)
    routers = Routers(model)
    again_T, of_replayed = gradients(model, replace(batch, experts_NW=own_NW), routers)
    assert torch.equal(lp_T, again_T)
    assert of_own.keys() == of_replayed.keys()
    assert all(torch.equal(of_own[name], of_replayed[name]) for name in of_own)
    assert routers.last is not None
    sums = routers.last.sums()
    assert sums.mean("router/replayed") == sums.mean("router/agreement") == 1.0


@pytest.mark.parametrize(("family", "checkpointing"), in_turn(list(FAMILIES), [False, True]))
def test_another_choice_is_taken_and_learned(family: str, checkpointing: bool, tmp_path: Path) -> None:
    model, batch = model_of(family, tmp_path / "base"), packed(random_rows(1, 4))
    own_NW = chosen(model, batch)
    other_NW = np.where(own_NW < 0, -1, (own_NW + 1) % EXPERTS).astype(np.int16)
    routers = Routers(model)
    expected_T, expected = gradients(model, replace(batch, experts_NW=other_NW), routers)
    own_T, _ = gradients(model, batch, routers)
    assert not torch.equal(expected_T, own_T)
    assert any(
        each.abs().sum() > 0
        for name, each in expected.items()
        if name.endswith(("gate.weight", "router.weight"))
    )
    if checkpointing:
        enable_activation_checkpointing(model)
        model.train()
        found_T, found = gradients(model, replace(batch, experts_NW=other_NW), routers)
        assert torch.equal(expected_T, found_T)
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_what_no_router_can_have_chosen_is_not_replayed(tmp_path: Path) -> None:
    model, batch = model_of("Qwen3Moe", tmp_path / "base"), packed(random_rows(1, 4))
    own_NW = chosen(model, batch)
    lp_T, _ = gradients(model, batch, None)
    broken_NW = own_NW.copy()
    broken_NW[0::4], broken_NW[1::4], broken_NW[2::4] = 0, EXPERTS + 3, -1
    routers = Routers(model)
    again_T, _ = gradients(model, replace(batch, experts_NW=broken_NW), routers)
    assert torch.equal(lp_T, again_T)
    assert routers.last is not None
    known = len(range(3, len(own_NW), 4))
    assert routers.last.sums().mean("router/replayed") == pytest.approx(known / len(own_NW))


def test_a_pack_replays_what_its_rows_replay_alone(tmp_path: Path) -> None:
    model, rows = model_of("Qwen3Moe", tmp_path / "base"), random_rows(1, 3)
    draw = np.random.default_rng(5)
    rows = [
        replace(row, experts_LW=draw.permuted(np.tile(np.arange(4, dtype=np.int16), (len(row), 1)), axis=1))
        for row in rows
    ]
    rows[1] = replace(rows[1], experts_LW=None)
    routers, together = Routers(model), packed(rows)
    lp_T, _ = gradients(model, together, routers)
    for row in range(3):
        alone_T, _ = gradients(model, packed([rows[row]]), routers)
        torch.testing.assert_close(lp_T[torch.from_numpy(together.rows_T) == row], alone_T, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"router_replay": True}, r"trainer\.router_replay"),
        ({"algorithm": {"router_aux_loss": 0.1}}, r"trainer\.algorithm\.router_aux_loss"),
    ],
)
def test_a_model_without_routers_is_refused(
    make_learner: MakeLearner, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(SystemExit, match=rf"{said}: Qwen3ForCausalLM has no routers"):
        make_learner(**given)


def test_a_router_that_chooses_in_another_way_is_refused_by_name(tmp_path: Path) -> None:
    model = model_of("Qwen3Moe", tmp_path / "base")
    router = model.model.layers[1].mlp.gate

    def by_sorting(hidden_NH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_NE = hidden_NH @ router.weight.T
        scores_NK, chosen_NK = logits_NE.softmax(1).sort(1, descending=True)
        return logits_NE, scores_NK[:, :2], chosen_NK[:, :2]

    router.forward = by_sorting
    with pytest.raises(RoutersUnknown, match="Qwen3MoeTopKRouter calls topk 0 times"):
        Routers(model)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_metrics_and_the_auxiliary_loss_with_its_gradient_are_those_of_transformers_on_any_packing(
    make_learner: MakeLearner, tmp_path: Path, checkpointing: bool
) -> None:
    """The rows have no advantage, so that only the auxiliary loss has a gradient."""
    made_experts("Qwen3Moe", tmp_path / "base")
    rows, found = [replace(row, advantage=0.0) for row in random_rows(2, 6)], {}
    for max_tokens in (40, 10_000):
        learner = make_learner(
            model_path=tmp_path / "base",
            activation_checkpointing=checkpointing,
            algorithm={"max_tokens": max_tokens, "router_aux_loss": 0.5},
        )
        metrics = learner.leader.optimise(StepRequest(rows, 0, learner.settings.algorithm))
        names = [name for name in metrics if name.startswith("router/")]
        found[max_tokens] = {name: metrics[name] for name in ("grad_norm", *names)}
    assert found[40] == pytest.approx(found[10_000], rel=1e-4)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    each = [model(input_ids=torch.from_numpy(row.ids_L)[None], output_router_logits=True) for row in rows]
    logits = tuple(torch.cat(layer) for layer in zip(*(one.router_logits for one in each), strict=True))
    loss = transformers.models.qwen3_moe.modeling_qwen3_moe.load_balancing_loss_func(logits, EXPERTS, 2)
    torch.autograd.backward(0.5 * loss)
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in gradients])))
    shares_NE = torch.cat(logits).detach().softmax(1)
    loads = [torch.bincount(layer.topk(2).indices.flatten(), minlength=EXPERTS) for layer in logits]
    assert norm > 1e-6
    assert found[40] == {
        "grad_norm": pytest.approx(norm, rel=1e-4),
        "router/aux_loss": pytest.approx(float(loss.detach()), rel=1e-5),
        "router/entropy": pytest.approx(float(torch.special.entr(shares_NE).sum(1).mean()), rel=1e-5),
        "router/load_max": pytest.approx(max(float(one.max() / one.double().mean()) for one in loads)),
        "router/load_zero": pytest.approx(sum(float((one == 0).double().mean()) for one in loads) / 2),
        "router/replayed": 0,
    }, "nothing is replayed, so there is no router/agreement"


@pytest.mark.parametrize(
    "given",
    [
        {"zero_stage": 1, "activation_checkpointing": True},
        {"zero_stage": 3, "activation_checkpointing": True},
        {"dtype": "bfloat16"},
        {"lora": {"rank": 4, "target_modules": ["q_proj", "o_proj"]}},
    ],
)
def test_a_step_replays_and_says_how_much(
    make_learner: MakeLearner, tmp_path: Path, given: dict[str, Any]
) -> None:
    made_experts("Qwen3Moe", tmp_path / "base")
    learner = make_learner(model_path=tmp_path / "base", router_replay=True, **given)
    rows = with_experts(random_rows(2, 6))
    rows[0] = replace(rows[0], experts_LW=None)
    metrics = learner.leader.optimise(StepRequest(rows, 0, learner.settings.algorithm))
    tokens = sum(map(len, rows))
    assert metrics["router/replayed"] == pytest.approx(1 - len(rows[0]) / tokens)
    assert 0 < metrics["router/agreement"] < 1
    assert learner.leader.replayed_width == 4


def turn_with_experts(turn_id: str, experts: list[list[int]], **fields: Any) -> Turn:
    numbers = np.array(experts, "<i4").tobytes()
    return turn("s1", turn_id, experts=RoutedExperts.of_int32(numbers, len(experts)), **fields)


def test_a_row_has_the_experts_of_its_turns() -> None:
    last = {"parent_id": "b", "context_ids": [5], "output_ids": [13, 14], "started_at": 102.0}
    turns = [
        turn_with_experts("a", [[1, 2], [1, 3]], context_ids=[2, 3], output_ids=[10, 11]),
        turn("s1", "b", parent_id="a", context_ids=[4], output_ids=[12], started_at=101.0),
        turn_with_experts("c", [[300, 0], [1, 0], [2, 0]], **last),
    ]
    (row,) = rows_of("s1", turns, {"a", "b", "c"})
    assert row.ids_L.tolist() == [2, 3, 10, 11, 4, 12, 5, 13, 14]
    assert row.experts_LW is not None
    none = [-1, -1]
    assert row.experts_LW.tolist() == [none, [1, 2], [1, 3], none, none, [300, 0], [1, 0], [2, 0], none]
    (plain,) = rows_of("s1", [turn("s1", "a")], {"a"})
    assert plain.experts_LW is None


@pytest.mark.parametrize("width", [0, 2, 4])
def test_only_experts_that_are_replayed_are_kept(width: int) -> None:
    session = Session("s1")
    session.take(Entry("1-0", turn_with_experts("a", [[1, 2]])), width)
    assert (session.turns["a"].experts is not None) == (width == 2)


def test_the_auxiliary_loss_makes_the_load_even(make_learner: MakeLearner, tmp_path: Path) -> None:
    made_experts("Qwen3Moe", tmp_path / "base")
    learner = make_learner(
        model_path=tmp_path / "base",
        optimizer={"lr": 1e-2, "warmup_steps": 0},
        algorithm={"router_aux_loss": 1.0},
    )
    rows = [replace(row, advantage=0.0) for row in random_rows(2, 6)]
    values = [
        learner.leader.optimise(StepRequest(rows, 0, learner.settings.algorithm))["router/aux_loss"]
        for _ in range(8)
    ]
    assert values[-1] < values[0]
