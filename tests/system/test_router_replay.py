"""Mixtures of experts on the real engine: with its experts, the trainer comes closer to its logprobs.

The engine computes in bfloat16 and the trainer in float32, so some of their choices differ.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from redis import Redis
from torch import Tensor

from gateway.app import create_app
from gateway.settings import GatewaySettings
from rollout_queue.contract.codec import decode
from rollout_queue.contract.records import Turn
from rollout_queue.redis import keys
from tests.support.rollout_server.real_server import REAL_ENGINE, real_server
from tests.support.serving import serving
from tests.support.tiny_model import make_tiny_experts
from trainer_service.model.forward import forward
from trainer_service.model.huggingface import load_model
from trainer_service.model.packed_attention import packing_of
from trainer_service.model.routers import Routers
from trainer_service.rows.rows import Row, micro_batches, planned_rows

pytestmark = REAL_ENGINE

SESSIONS, TURNS, TOKENS = 6, 3, 24


@dataclass
class Recording:
    """A gateway in front of an engine that tells its experts."""

    url: str
    model: Path
    redis: Redis

    def session(self, number: int) -> list[Turn]:
        """A conversation, each turn of which finds the former ones in the engine's prefix cache."""
        ticket = httpx.post(f"{self.url}/sessions", json={}).raise_for_status().json()
        client = openai.OpenAI(base_url=ticket["base_url"], api_key=ticket["api_key"], max_retries=0)
        history: list[Any] = [{"role": "user", "content": f"what is the value of {number}?"}]
        for turn in range(TURNS):
            answer = client.chat.completions.create(model="m", messages=history, max_tokens=TOKENS)
            content = answer.choices[0].message.content or ""
            reply = {"role": "tool", "tool_call_id": "c", "content": f"it is {turn}"}
            history += [{"role": "assistant", "content": content}, reply]
        fields: Any = self.redis.hgetall(keys.session(ticket["session_id"]))
        turns = [decode(value) for name, value in fields.items() if name.startswith(b"t:")]
        return sorted((t for t in turns if isinstance(t, Turn)), key=lambda t: t.started_at)


@pytest.fixture(scope="module")
def recording(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    model = make_tiny_experts(tmp_path_factory.mktemp("experts") / "model")
    directory = tmp_path_factory.mktemp("rollout")
    redis = Redis.from_url(redis_url)
    with real_server(directory, model, router_replay=True, dtype="bfloat16") as server:
        settings = GatewaySettings(
            redis_url=redis_url, model_path=model, engines=[server.engine_url], router_replay=True
        )
        with serving(create_app(settings)) as url:
            yield Recording(url, model, redis)
    redis.close()


def difference(model: Any, routers: Routers, rows: list[Row]) -> Tensor:
    """|log p of the trainer - log p of the engine| of each sampled token, in nats."""
    (batch,) = micro_batches(rows, 100_000)
    with torch.no_grad():
        lp_T, _ = forward(model, batch, packing_of(model), torch.device("cpu"), routers=routers)
    return (lp_T.double() - torch.from_numpy(batch.logprobs_T).double()).abs()


def test_with_the_engines_experts_the_trainers_logprobs_are_closer_to_the_engines(
    recording: Recording,
) -> None:
    rows = []
    for number in range(SESSIONS):
        turns = recording.session(number)
        assert [turn.relation for turn in turns] == ["root", *["extends"] * (TURNS - 1)]
        trainable = [turn.turn_id for turn in turns]
        rows += [planned.row() for planned in planned_rows(turns[0].session_id, turns, trainable)]
    for row in rows:
        assert row.experts_LW is not None
        assert (row.experts_LW[:-1] >= 0).all(), "the engine tells the experts of cached tokens, too"
        assert (row.experts_LW[-1] == -1).all()
    model = load_model(recording.model, torch.float32)
    routers = Routers(model)
    own_T = difference(model, routers, [replace(row, experts_LW=None) for row in rows])
    replayed_T = difference(model, routers, rows)
    assert routers.last is not None
    agreement = routers.last.sums().mean("router/agreement")
    print(f"|d log p| {own_T.mean():.4f}, with replay {replayed_T.mean():.4f}; agreement {agreement:.4f}")
    assert 0.9 < agreement < 1, "the records are those of other tokens, or nothing was left to replay"
    assert replayed_T.mean() < own_T.mean() / 2
    assert replayed_T.max() < own_T.max() / 2
