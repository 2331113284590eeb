"""What a client has made can be listed by its key, and expires as the client has said."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from rollout_queue.redis import keys
from tests.support.gateway.running import OTHER_KEY, Backends, RunningGateway
from tests.support.gateway.scripted_trainer import ScriptedTrainer, scripted_trainer
from tests.support.gateway.tinker_loop import SamplingLoop

DAY_S = 86400


@pytest.fixture
def trainer(gateway: RunningGateway) -> Iterator[ScriptedTrainer]:
    with scripted_trainer(gateway.redis) as running:
        yield running


@pytest.fixture
def loop(gateway: RunningGateway, backends: Backends, trainer: ScriptedTrainer) -> SamplingLoop:
    loop = SamplingLoop(gateway, str(backends.model_path)).start()
    saves: list[tuple[str, dict[str, Any]]] = [
        ("save_weights", {"path": "one", "ttl_seconds": DAY_S, "user_metadata": {"why": "test"}}),
        ("save_weights_for_sampler", {"path": "two"}),
        ("save_weights", {"path": "three"}),
        ("save_weights_for_sampler", {"sampling_session_seq_id": 9}),
    ]
    for number, (verb, body) in enumerate(saves, 1):
        loop.poll(loop.command(verb, number, **body).json())
    return loop


def get(loop: SamplingLoop, path: str, **query: Any) -> Any:
    headers = {"x-api-key": loop.key}
    return loop.gateway.call("GET", f"/api/v1/{path}", key=None, headers=headers, params=query)


def test_checkpoints_are_listed_the_newest_first(loop: SamplingLoop) -> None:
    found = get(loop, f"training_runs/{loop.model_id}/checkpoints").json()["checkpoints"]
    assert [(each["checkpoint_id"], each["checkpoint_type"]) for each in found] == [
        ("weights/three", "training"),
        ("sampler_weights/two", "sampler"),
        ("weights/one", "training"),
    ]
    oldest = found[-1]
    assert (oldest["tinker_path"], oldest["size_bytes"]) == (f"tinker://{loop.model_id}/weights/one", 1234)
    assert (oldest["user_metadata"], oldest["expires_at"] > oldest["time"]) == ({"why": "test"}, True)
    assert found[0]["expires_at"] is None
    everything = get(loop, "checkpoints", limit=2, offset=1).json()
    assert [each["checkpoint_id"] for each in everything["checkpoints"]] == [
        "sampler_weights/two",
        "weights/one",
    ]
    assert everything["cursor"] == {"limit": 2, "offset": 1, "total_count": 3}


def test_training_runs_and_sessions_are_listed(loop: SamplingLoop) -> None:
    loop.create(seq=1)
    page = get(loop, "training_runs", limit=1).json()
    assert page["cursor"] == {"limit": 1, "offset": 0, "total_count": 2}
    assert [each["training_run_id"] for each in page["training_runs"]] == [f"{loop.session_id}:train:1"]
    run = get(loop, f"training_runs/{loop.model_id}", access_scope="owned").json()
    assert (run["base_model"], run["is_lora"], run["lora_rank"]) == (loop.base_model, True, 8)
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/three"
    assert run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/two"
    assert get(loop, "sessions").json() == {"sessions": [loop.session_id]}
    session = get(loop, f"sessions/{loop.session_id}").json()
    assert session["training_run_ids"] == [loop.model_id, f"{loop.session_id}:train:1"]
    assert session["sampler_ids"] == [f"{loop.session_id}:sample:0", f"{loop.session_id}:sample:9"]
    assert get(loop, "training_runs", project_id="x").status_code == 400
    assert get(loop, "training_runs", limit=0).status_code == 400


def test_another_key_lists_nothing(loop: SamplingLoop) -> None:
    other = SamplingLoop(loop.gateway, loop.base_model, f"tml-{OTHER_KEY}")
    assert get(other, "training_runs").json()["training_runs"] == []
    assert get(other, "checkpoints").json()["checkpoints"] == []
    assert get(other, "sessions").json() == {"sessions": []}
    for path in (f"training_runs/{loop.model_id}", f"sessions/{loop.session_id}"):
        assert get(other, path).status_code == 404
    assert get(other, f"training_runs/{loop.model_id}/checkpoints").status_code == 404


def test_weights_that_have_expired_are_gone(loop: SamplingLoop) -> None:
    path = f"tinker://{loop.model_id}/weights/one"
    assert loop.post("weights_info", {"tinker_path": path}).status_code == 200
    terms = msgspec.json.encode({"ttl_s": 0})
    loop.gateway.redis.hset(keys.kept_terms(loop.model_id), "weights/one#1", terms)
    assert loop.post("weights_info", {"tinker_path": path}).status_code == 404
    into = {"session_id": loop.session_id, "model_seq_id": 5, "path": path, "optimizer": True}
    assert loop.post("load_weights", into).status_code == 404
    found = get(loop, f"training_runs/{loop.model_id}/checkpoints").json()["checkpoints"]
    assert "weights/one" not in [each["checkpoint_id"] for each in found]
