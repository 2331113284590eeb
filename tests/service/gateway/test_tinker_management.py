"""What a client has made can be listed by its key, and expires as the client has said."""

from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis as AsyncRedis

from gateway.rest.tinker_api.weights import KeptWeightsStore
from rollout_queue.redis import keys
from rollout_queue.redis.commands.submission import CommandSubmissions
from tests.support.gateway.running import OTHER_KEY, Backends, RunningGateway
from tests.support.gateway.scripted_trainer import ScriptedTrainer
from tests.support.gateway.tinker_loop import SamplingLoop

DAY_S = 86400


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


def send(loop: SamplingLoop, method: str, what: str, body: Any = None, of: str = "") -> Any:
    path = f"/api/v1/training_runs/{of or loop.model_id}/checkpoints/{what}"
    return loop.gateway.call(method, path, body, key=None, headers={"x-api-key": loop.key})


def listed(loop: SamplingLoop) -> dict[str, Any]:
    found = get(loop, f"training_runs/{loop.model_id}/checkpoints").json()["checkpoints"]
    return {each["checkpoint_id"]: each for each in found}


def sampler_of(loop: SamplingLoop, path: str, number: int) -> Any:
    body = {"session_id": loop.session_id, "sampling_session_seq_id": number, "model_path": path}
    return loop.post("create_sampling_session", body)


def other_loop(loop: SamplingLoop) -> SamplingLoop:
    return SamplingLoop(loop.gateway, loop.base_model, f"tml-{OTHER_KEY}").start()


def test_deleted_weights_cannot_be_listed_loaded_or_sampled(loop: SamplingLoop) -> None:
    other = other_loop(loop)
    for name in ("weights/one", "sampler_weights/two"):
        assert send(other, "DELETE", name, of=loop.model_id).status_code == 404
        assert name in listed(loop), "only its owner deletes it"
    sampling = f"tinker://{loop.model_id}/sampler_weights/two"
    session = sampler_of(loop, sampling, 20).json()["sampling_session_id"]
    for name in ("weights/one", "sampler_weights/two"):
        assert send(loop, "DELETE", name).status_code == 204
        again = send(loop, "DELETE", name)
        assert (again.status_code, again.json()["error"]["message"]) == (
            404,
            f"there are no weights tinker://{loop.model_id}/{name}",
        )
    assert list(listed(loop)) == ["weights/three"]
    assert (
        loop.post("weights_info", {"tinker_path": f"tinker://{loop.model_id}/weights/one"}).status_code == 404
    )
    assert sampler_of(loop, sampling, 21).status_code == 404
    refused = loop.ask(0, [1, 2], sampling_session_id=session)
    assert refused.status_code == 404, "a sampling session that has begun ends with it"
    for unknown in ("weights/none", "sampler_weights/~9", "elsewhere/one"):
        assert send(loop, "DELETE", unknown).status_code == 404


def test_the_trainer_learns_of_each_deletion(loop: SamplingLoop, trainer: ScriptedTrainer) -> None:
    send(loop, "DELETE", "weights/one")
    send(loop, "DELETE", "sampler_weights/two")
    saved = {each.number: each.position for each in trainer.seen if each.model_id == loop.model_id}
    dropped = trainer.reader.dropped()
    (drop,) = dropped.weights[loop.model_id, "weights/one"]
    assert (drop.saved, drop.deleted) == (saved[1], max(saved.values()))
    assert dropped.adapters == {(loop.model_id.replace(":", "."), 2): saved[2]}


def test_a_time_to_live_is_changed_and_taken_back(loop: SamplingLoop) -> None:
    assert send(loop, "PUT", "weights/three/ttl", {"ttl_seconds": 2 * DAY_S}).status_code == 204
    found = listed(loop)
    assert found["weights/three"]["expires_at"] > found["weights/one"]["expires_at"]
    assert send(loop, "PUT", "weights/one/ttl", {"ttl_seconds": None}).status_code == 204
    assert listed(loop)["weights/one"]["expires_at"] is None
    assert listed(loop)["weights/one"]["user_metadata"] == {"why": "test"}
    timed: Any = loop.gateway.redis.zrange(keys.KEPT_EXPIRES, 0, -1)
    assert timed == [f"{loop.model_id}|weights/three|3".encode()]
    for seconds in (3599, 315_360_001):
        assert send(loop, "PUT", "weights/one/ttl", {"ttl_seconds": seconds}).status_code == 400
    assert send(loop, "PUT", "weights/none/ttl", {"ttl_seconds": DAY_S}).status_code == 404
    other = other_loop(loop)
    assert send(other, "PUT", "weights/one/ttl", {"ttl_seconds": DAY_S}, loop.model_id).status_code == 404


async def test_weights_whose_time_is_over_are_deleted(loop: SamplingLoop, trainer: ScriptedTrainer) -> None:
    known = loop.gateway.redis.connection_pool.connection_kwargs
    redis = AsyncRedis(host=known["host"], port=known["port"], db=known["db"])
    store = KeptWeightsStore(redis, CommandSubmissions(redis, lambda: 1000))
    await store.end_expired()
    assert "weights/one" in listed(loop), "its time is not over"
    for name in ("one", "three"):
        send(loop, "PUT", f"weights/{name}/ttl", {"ttl_seconds": DAY_S})
        loop.gateway.redis.zadd(
            keys.KEPT_EXPIRES, {f"{loop.model_id}|weights/{name}|{1 if name == 'one' else 3}": 1}
        )
    assert await store.end_expired(most=1) == 1
    assert len(trainer.reader.dropped().weights) == 1, "so many in a round"
    assert await store.end_expired() == 1
    assert await store.end_expired() == 0
    assert list(listed(loop)) == ["sampler_weights/two"]
    assert set(trainer.reader.dropped().weights) == {
        (loop.model_id, "weights/one"),
        (loop.model_id, "weights/three"),
    }
    await redis.aclose()


def test_published_weights_are_for_every_key(loop: SamplingLoop) -> None:
    other = other_loop(loop)
    path, sampling = (f"tinker://{loop.model_id}/{name}" for name in ("weights/one", "sampler_weights/two"))

    def uses() -> list[int]:
        into = {"session_id": other.session_id, "model_seq_id": 5, "path": path, "optimizer": True}
        return [
            other.post("weights_info", {"tinker_path": path}).status_code,
            other.post("load_weights", into).status_code,
            sampler_of(other, sampling, 7).status_code,
        ]

    assert uses() == [404, 404, 404]
    for name in ("weights/one", "sampler_weights/two"):
        assert send(other, "POST", f"{name}/publish", of=loop.model_id).status_code == 404
        assert send(loop, "POST", f"{name}/publish").status_code == 204
    assert uses() == [200, 200, 200]
    public = {name: each["public"] for name, each in listed(loop).items()}
    assert public == {"weights/one": True, "sampler_weights/two": True, "weights/three": False}
    assert listed(loop)["weights/one"]["expires_at"] is not None, "its time goes on"
    for refused in ("publish", ""):
        name = f"weights/one/{refused}".rstrip("/")
        assert send(other, "DELETE", name, of=loop.model_id).status_code == 404
    for name in ("weights/one", "sampler_weights/two"):
        assert send(loop, "DELETE", f"{name}/publish").status_code == 204
    assert uses() == [404, 404, 404]
    assert not any(each["public"] for each in listed(loop).values())
    assert send(loop, "POST", "weights/one/publish").status_code == 204, "and back again"


def test_weights_without_a_name_end_with_their_client(loop: SamplingLoop, trainer: ScriptedTrainer) -> None:
    assert trainer.reader.dropped().adapters == {}
    body = {"reason": {"type": "success"}, "detail": None}
    assert loop.post(f"sessions/{loop.session_id}/finish", body).status_code == 200
    assert list(trainer.reader.dropped().adapters) == [(loop.model_id.replace(":", "."), 4)]
    assert set(listed(loop)) == {"weights/one", "weights/three", "sampler_weights/two"}
