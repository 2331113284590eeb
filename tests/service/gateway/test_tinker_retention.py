"""The records of a client session have an end; named weights outlast them."""

from collections.abc import Iterator
from typing import Any

import pytest

from rollout_queue.redis import keys
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.gateway.scripted_trainer import ScriptedTrainer, scripted_trainer
from tests.support.gateway.tinker_loop import ADAM, SamplingLoop, datum
from tests.support.waiting import wait_until

ONE = datum([1, 2, 3], [2, 3, 7], weights=[0.0, 1.0, -2.5])
SUCCESS = {"reason": {"type": "success"}}


@pytest.fixture
def forgetful(backends: Backends, gateway: RunningGateway) -> Iterator[RunningGateway]:
    with backends.gateway(tinker={"session_retention_s": 0.1}) as running:
        yield running


@pytest.fixture
def trainer(forgetful: RunningGateway) -> Iterator[ScriptedTrainer]:
    with scripted_trainer(forgetful.redis) as running:
        yield running


def lasting(gateway: RunningGateway, *names: str) -> set[str]:
    """The keys with one of these names in them that do not expire: results do."""
    found = {each.decode() for each in gateway.redis.scan_iter("*", count=1000)}
    return {each for each in found if any(name in each for name in names) and gateway.redis.ttl(each) == -1}


def trained(gateway: RunningGateway, base_model: str, *saves: tuple[str, dict[str, Any]]) -> SamplingLoop:
    """A session that has made a step, and then these commands."""
    loop = SamplingLoop(gateway, base_model).start()
    promises = [loop.pass_(1, ONE).json(), loop.command("optim_step", 2, adam_params=ADAM).json()]
    promises += [loop.command(verb, 3 + at, **body).json() for at, (verb, body) in enumerate(saves)]
    for promise in promises:
        loop.poll(promise)
    return loop


def finish(loop: SamplingLoop) -> int:
    status: int = loop.post(f"sessions/{loop.session_id}/finish", SUCCESS).status_code
    return status


def get(loop: SamplingLoop, path: str) -> Any:
    return loop.gateway.call("GET", f"/api/v1/{path}", key=None, headers={"x-api-key": loop.key})


def test_sessions_that_ended_long_ago_leave_nothing(
    forgetful: RunningGateway, trainer: ScriptedTrainer, backends: Backends
) -> None:
    model = str(backends.model_path)
    for_sampler = ("save_weights_for_sampler", {"sampling_session_seq_id": 9})
    loops = [trained(forgetful, model, for_sampler) for _ in range(5)]
    ids = [loop.session_id for loop in loops]
    assert len(lasting(forgetful, *ids)) >= 5 * len(ids), "session, made, model, kept, targets"
    for loop in loops:
        assert finish(loop) == 200
    wait_until(lambda: not lasting(forgetful, *ids))
    wait_until(lambda: not forgetful.redis.zcard(keys.CLIENT_SESSIONS_ENDED))
    assert get(loops[0], "sessions").json() == {"sessions": []}
    assert get(loops[0], "training_runs").json()["cursor"]["total_count"] == 0
    for loop in loops:
        assert loop.post("session_heartbeat", {"session_id": loop.session_id}).status_code == 404
        assert finish(loop) == 404
        assert loop.ask(0, [1, 2]).status_code == 404
        assert loop.command("optim_step", 4, adam_params=ADAM).status_code == 404
    assert not lasting(forgetful, *ids), "no request brings a record back"


def test_named_weights_outlast_their_session(
    forgetful: RunningGateway, trainer: ScriptedTrainer, backends: Backends
) -> None:
    model = str(backends.model_path)
    loop = trained(forgetful, model, ("save_weights", {"path": "best", "ttl_seconds": 86400}))
    assert finish(loop) == 200
    digests = keys.model(loop.model_id)
    wait_until(lambda: not forgetful.redis.exists(keys.client_session(loop.session_id)))
    assert get(loop, f"sessions/{loop.session_id}").status_code == 404
    fields: Any = forgetful.redis.hkeys(digests)
    assert not [each for each in fields if each.startswith(b"d:")]
    kept = {keys.model(loop.model_id), keys.kept(loop.model_id), keys.kept_terms(loop.model_id)}
    assert lasting(forgetful, loop.session_id) == kept
    (found,) = get(loop, "checkpoints").json()["checkpoints"]
    assert (found["checkpoint_id"], found["expires_at"] is None) == ("weights/best", False)
    refused = loop.command("optim_step", 2, adam_params=ADAM)
    assert (refused.status_code, "takes no more commands" in refused.text) == (404, True)

    later = trained(forgetful, model)
    into = {"session_id": later.session_id, "model_seq_id": 1, "path": found["tinker_path"]}
    loaded = loop.post("load_weights", into | {"optimizer": True})
    assert loaded.status_code == 200
    assert later.poll(loaded.json()).json()["type"] == "load_weights"

    forgetful.redis.hdel(keys.kept(loop.model_id), "weights/best")
    wait_until(lambda: not lasting(forgetful, loop.session_id))
    listed = get(loop, "training_runs").json()["training_runs"]
    assert loop.model_id not in [each["training_run_id"] for each in listed]


def test_signs_of_life_and_a_second_finish_postpone_no_end(
    backends: Backends, gateway: RunningGateway
) -> None:
    loop = SamplingLoop(gateway, str(backends.model_path)).start()
    with backends.gateway(tinker={"session_timeout_s": 0.2}) as impatient:
        redis, ended = impatient.redis, keys.CLIENT_SESSIONS_ENDED
        first = wait_until(lambda: redis.zscore(ended, loop.session_id))
        wait_until(lambda: redis.zscore(keys.CLIENT_SESSIONS_LIVE, loop.session_id) is None)
        assert loop.post("session_heartbeat", {"session_id": loop.session_id}).status_code == 200
        assert [finish(loop), finish(loop)] == [200, 200]
        assert redis.zscore(ended, loop.session_id) == first
        assert redis.zscore(keys.CLIENT_SESSIONS_LIVE, loop.session_id) is None
        body = {"session_id": loop.session_id, "model_seq_id": 1, "base_model": loop.base_model}
        refused = loop.post("create_model", body | {"lora_config": {"rank": 8}, "type": "create_model"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "session_ended")
        assert not redis.exists(keys.model(f"{loop.session_id}:train:1"))


@pytest.mark.parametrize("packed", [b"\x02a newer schema", b"\x01no record"])
def test_a_record_that_cannot_be_read_stops_no_other_end(
    backends: Backends, gateway: RunningGateway, packed: bytes
) -> None:
    redis, model = gateway.redis, str(backends.model_path)
    with scripted_trainer(redis):
        first, *others = (trained(gateway, model) for _ in range(3))
        redis.hset(keys.kept(first.model_id), "weights/best", packed)
        with backends.gateway(tinker={"session_timeout_s": 0.2, "session_retention_s": 0.1}):
            for loop in others:
                wait_until(lambda: not lasting(gateway, loop.session_id))  # noqa: B023
            wait_until(lambda: redis.zscore(keys.CLIENT_SESSIONS_LIVE, first.session_id) is None)
        assert redis.hget(keys.model(first.model_id), "ended"), "its memory is free"
        assert redis.hget(keys.kept(first.model_id), "weights/best") == packed
        redis.hdel(keys.kept(first.model_id), "weights/best")
        with backends.gateway(tinker={"session_retention_s": 0.1}):
            wait_until(lambda: not lasting(gateway, first.session_id))


def test_a_bug_does_not_end_the_sweeping(backends: Backends, gateway: RunningGateway) -> None:
    redis, model = gateway.redis, str(backends.model_path)
    broken: Any = {b"\xff": 1.0}  # no text
    redis.zadd(keys.CLIENT_SESSIONS_ENDED, broken)
    with backends.gateway(tinker={"session_timeout_s": 0.2}):
        for _ in range(2):
            loop = SamplingLoop(gateway, model).start()
            wait_until(lambda: redis.zscore(keys.CLIENT_SESSIONS_ENDED, loop.session_id))  # noqa: B023
