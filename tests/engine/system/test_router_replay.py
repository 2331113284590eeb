"""Mixtures of experts on the real engine: with its experts, the trainer comes closer to its logprobs.

The engine computes in bfloat16 and the trainer in float32, so some of their choices differ.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis
from torch import Tensor

from tests.support.redis_clients import redis_at
from tests.support.system.real_system import System, running_system, system_settings
from tests.support.system.turns import recorded_turns
from tests.support.tiny_model import make_tiny_experts
from tests.support.waiting import wait_until
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import load_model
from trainer_service.model.packed_attention import packing_of
from trainer_service.model.routers import Routers
from trainer_service.rows.rows import Row, micro_batches, planned_rows

pytestmark = pytest.mark.long

SESSIONS, TURNS, TOKENS = 6, 3, 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_experts(tmp_path_factory.mktemp("experts") / "model")


@pytest.fixture(scope="module")
def replaying(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    settings = system_settings(tmp_path_factory.mktemp("system"), model, dtype="bfloat16")
    services = {name: {**given, "router_replay": True} for name, given in settings.services.items()}
    settings = settings.model_copy(update={"services": services})
    with running_system(settings) as system:
        yield system


def converse(system: System, ticket: dict[str, Any], number: int) -> None:
    """A conversation, each turn of which finds the former ones in the engine's prefix cache."""
    history: list[Any] = [{"role": "user", "content": f"what is the value of {number}?"}]
    for turn in range(TURNS):
        calls = system.client(ticket).chat.completions
        answer = calls.create(model="policy", messages=history, max_tokens=TOKENS)
        content = answer.choices[0].message.content or ""
        reply = {"role": "tool", "tool_call_id": "c", "content": f"it is {turn}"}
        history += [{"role": "assistant", "content": content}, reply]


def trained_group(system: System) -> list[str]:
    return system.train_group(SESSIONS, lambda ticket, number: converse(system, ticket, number))


def rows_of(redis: Redis, session_id: str) -> list[Row]:
    """The rows that train the session."""
    turns = recorded_turns(redis, session_id)
    assert [turn.relation for turn in turns] == ["root", *["extends"] * (TURNS - 1)]
    return [each.row() for each in planned_rows(session_id, turns, [turn.turn_id for turn in turns])]


def difference(model: Any, routers: Routers, rows: list[Row]) -> Tensor:
    """|log p of the trainer - log p of the engine| of each sampled token, in nats."""
    (batch,) = micro_batches(rows, 100_000)
    with torch.no_grad():
        lp_T, *_ = scores(model, batch, packing_of(model), torch.device("cpu"), routers=routers)
    return (lp_T.double() - torch.from_numpy(batch.logprobs_T).double()).abs()


def test_with_the_engines_experts_the_trainers_logprobs_are_closer_to_the_engines(
    replaying: System, model: Path
) -> None:
    with redis_at(f"redis://127.0.0.1:{replaying.settings.redis_port}/0") as redis:
        rows = [row for session_id in trained_group(replaying) for row in rows_of(redis, session_id)]
    for row in rows:
        assert row.experts_LW is not None
        assert (row.experts_LW[:-1] >= 0).all(), "the engine tells the experts of cached tokens, too"
        assert (row.experts_LW[-1] == -1).all()
    untrained = load_model(model, torch.float32)
    routers = Routers(untrained)
    own_T = difference(untrained, routers, [replace(row, experts_LW=None) for row in rows])
    replayed_T = difference(untrained, routers, rows)
    found = routers.sums()
    agreement, replayed = found.mean("router/agreement"), found.mean("router/replayed")
    for name, gap_T in (("without", own_T), ("with", replayed_T)):
        print(f"|d log p| {name} replay: mean {gap_T.mean():.4f}, largest {gap_T.max():.3f}")
    print(f"{len(own_T)} sampled tokens; agreement {agreement:.4f}")
    assert 0.9 < agreement < 1, "the records are those of other tokens, or nothing was left to replay"
    assert replayed_T.mean() < own_T.mean() / 2
    assert replayed_T.max() < own_T.max() / 2
    assert replayed == pytest.approx(1 - len(rows) / sum(map(len, rows)))
    # The trainer itself has replayed the same.
    metrics = replaying.trainer("/status")["metrics"]
    assert metrics["router/replayed"] == pytest.approx(replayed)
    assert metrics["router/agreement"] == pytest.approx(agreement, abs=1e-3)
    assert metrics["mismatch/abs_logp"] == pytest.approx(float(replayed_T.mean()), rel=0.1)


def test_after_a_push_the_engine_tells_the_experts_of_the_trained_routers(replaying: System) -> None:
    step = replaying.trainer("/status")["step"]
    trained_group(replaying)
    status = wait_until(lambda: replaying.trainer("/status"))
    assert status["step"] == step + 1
    assert status["metrics"]["router/agreement"] > 0.9
    assert status["metrics"]["router/replayed"] > 0.9
    assert status["metrics"]["mismatch/abs_logp"] < 0.05
