"""A checkpoint is copied into a model of its own, once, and the copy outlasts its source."""

import threading
from typing import Any

import pytest

from gateway.rest.tinker_api.records import KeptTerms, encode_record
from rollout_queue.commands.command import LoadWeights, SaveWeights, request_id
from rollout_queue.commands.result import CommandFailed
from rollout_queue.redis import keys
from tests.support.gateway.running import ADMIN_KEY, OTHER_KEY, Backends, RunningGateway
from tests.support.gateway.scripted_trainer import ScriptedTrainer, result_of
from tests.support.gateway.tinker_loop import SamplingLoop
from tests.support.waiting import wait_until

DAY_S = 86400


@pytest.fixture
def loop(gateway: RunningGateway, backends: Backends, trainer: ScriptedTrainer) -> SamplingLoop:
    loop = SamplingLoop(gateway, str(backends.model_path)).start()
    loop.poll(loop.command("save_weights", 1, path="x", user_metadata={"why": "test"}).json())
    loop.poll(loop.command("save_weights_for_sampler", 2, path="s").json())
    return loop


def copy(of: SamplingLoop, by: SamplingLoop | None = None, **asked: Any) -> Any:
    """As SDK 0.30 asks."""
    by = by or of
    body = {"session_id": by.session_id, "model_seq_id": 7, "source_path": source(of)}
    return by.post("copy_weights", {name: each for name, each in (body | asked).items() if each is not None})


def source(loop: SamplingLoop) -> str:
    return f"tinker://{loop.model_id}/weights/x"


def checkpoints(loop: SamplingLoop, model_id: str) -> Any:
    path = f"/api/v1/training_runs/{model_id}/checkpoints"
    return loop.gateway.call("GET", path, key=None, headers={"x-api-key": loop.key}).json()["checkpoints"]


def delete(loop: SamplingLoop, model_id: str) -> None:
    path = f"/api/v1/training_runs/{model_id}/checkpoints/weights/x"
    reply = loop.gateway.call("DELETE", path, key=None, headers={"x-api-key": loop.key})
    assert reply.status_code == 204


def check_ended(loop: SamplingLoop, model_id: str) -> None:
    refused = loop.post("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})
    assert "takes no more commands" in refused.json()["error"]["message"]


def test_a_copy_is_a_checkpoint_of_a_model_that_takes_no_commands(
    loop: SamplingLoop, trainer: ScriptedTrainer
) -> None:
    made = f"{loop.session_id}:train:7"
    for _ in range(2):  # an answer that was lost is asked for again
        reply = copy(loop, ttl_seconds=DAY_S)
        assert (reply.status_code, reply.json()["tinker_path"]) == (200, f"tinker://{made}/weights/x")
    commands = [each.command for each in trainer.seen if each.model_id == made]
    assert commands == [LoadWeights(loop.model_id, "x", True), SaveWeights("x")]
    (listed,) = checkpoints(loop, made)
    assert (listed["checkpoint_type"], listed["user_metadata"]) == ("training", None)
    assert listed["expires_at"] > listed["time"]
    check_ended(loop, made)
    delete(loop, loop.model_id)
    assert copy(loop).status_code == 200, "it is there already"
    into = {"session_id": loop.session_id, "model_seq_id": 8, "optimizer": True}
    assert loop.post("load_weights", {"path": f"tinker://{made}/weights/x", **into}).status_code == 200


def test_a_copy_that_lasts_is_asked_for_again(
    loop: SamplingLoop, backends: Backends, trainer: ScriptedTrainer
) -> None:
    trainer.go_on.clear()
    with backends.gateway(tinker={"poll_s": 0.2}) as impatient:
        other = SamplingLoop(impatient, loop.base_model, loop.key, loop.session_id)
        assert copy(loop, other).status_code == 408
    trainer.go_on.set()
    made = f"{loop.session_id}:train:7"
    wait_until(lambda: loop.gateway.redis.hexists(keys.kept(made), "weights/x"))  # before it is asked for
    assert copy(loop).status_code == 200
    check_ended(loop, made)


def test_a_copy_may_last_longer_than_the_result_of_its_first_command(
    loop: SamplingLoop, backends: Backends, trainer: ScriptedTrainer
) -> None:
    go_on = threading.Event()
    trainer.result_of = lambda logged: (
        result_of(logged) if logged.number == 0 or go_on.wait(300) else CommandFailed("no test", "server")
    )
    first = keys.result(request_id(f"{loop.session_id}:train:7", 0))
    with backends.gateway(tinker={"poll_s": 0.2}) as impatient:
        other = SamplingLoop(impatient, loop.base_model, loop.key, loop.session_id)
        assert copy(loop, other).status_code == 408
        wait_until(lambda: loop.gateway.redis.delete(first) == 1)  # as it expires
        assert copy(loop, other).status_code == 408
    go_on.set()
    assert copy(loop).status_code == 200


def test_a_copy_that_is_gone_is_not_answered_again(loop: SamplingLoop) -> None:
    made = f"{loop.session_id}:train:7"
    assert copy(loop).status_code == 200
    over = {"weights/x#1": encode_record(KeptTerms(ttl_s=0.001))}
    redis: Any = loop.gateway.redis
    redis.hset(keys.kept_terms(made), mapping=over)
    assert copy(loop).status_code == 404, "its time is over"
    redis.delete(keys.kept_terms(made))
    assert copy(loop).status_code == 200
    delete(loop, made)
    assert copy(loop).status_code == 404


def test_a_copy_goes_with_the_data_of_its_user(
    loop: SamplingLoop, gateway: RunningGateway, backends: Backends
) -> None:
    anns = SamplingLoop(gateway, loop.base_model).start(user_metadata={"user": "ann"})
    assert copy(loop, anns).status_code == 200
    made = keys.model(f"{anns.session_id}:train:7")
    anns.post(f"sessions/{anns.session_id}/finish", {"reason": {"type": "success"}})
    with backends.gateway(tinker={"session_retention_s": 0.1}):
        wait_until(lambda: not gateway.redis.exists(keys.client_session(anns.session_id)))
    assert gateway.redis.exists(made), "it outlasts its session"
    assert gateway.call("DELETE", "/admin/users/ann/data", key=ADMIN_KEY).status_code == 200
    assert not gateway.redis.exists(made)


def test_only_own_and_published_checkpoints_are_copied(loop: SamplingLoop) -> None:
    other = SamplingLoop(loop.gateway, loop.base_model, f"tml-{OTHER_KEY}").start()
    assert copy(loop, other).status_code == 404
    assert copy(loop, other, session_id=loop.session_id).status_code == 404
    publish = f"/api/v1/training_runs/{loop.model_id}/checkpoints/weights/x/publish"
    loop.gateway.call("POST", publish, key=None, headers={"x-api-key": loop.key})
    assert copy(loop, other).status_code == 200
    assert copy(loop, other, session_id=loop.session_id).status_code == 404, "into its own sessions only"
    assert len(checkpoints(other, f"{other.session_id}:train:7")) == 1


def test_what_cannot_be_copied_is_named(loop: SamplingLoop, trainer: ScriptedTrainer) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"destination_project_id": "p"}, "destination_project_id"),
        ({"destination_project_id": "p", "session_id": None, "model_seq_id": None}, "destination_project_id"),
        ({"weights_access_token": "t"}, "weights_access_token"),
        ({"session_id": None}, "session_id"),
        ({"model_seq_id": None}, "session_id"),
        ({"source_path": f"tinker://{loop.model_id}/sampler_weights/s"}, "source_path"),
        ({"source_path": "x"}, "source_path"),
        ({"ttl_seconds": 1}, "ttl_seconds"),
    ]
    for asked, named in cases:
        refused = copy(loop, **asked)
        assert refused.status_code == 400, asked
        assert named in refused.json()["error"]["message"]
    headers = {"x-api-key": loop.key, "X-Tinker-Weights-Access-Token": "t"}
    body = {"session_id": loop.session_id, "model_seq_id": 7, "source_path": source(loop)}
    assert (
        loop.gateway.call("POST", "/api/v1/copy_weights", body, key=None, headers=headers).status_code == 400
    )
    assert copy(loop, source_path=f"tinker://{loop.model_id}/weights/none").status_code == 404
    errors = ["there is no room", "there is no model"]
    trainer.result_of = lambda logged: CommandFailed(errors[logged.number], "user")
    failed = copy(loop)
    assert (failed.status_code, "there is no room" in failed.text) == (400, True)
    taken = copy(loop, model_seq_id=0)
    assert "made with other arguments" in taken.json()["error"]["message"]
