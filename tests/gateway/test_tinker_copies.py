"""A checkpoint is copied into a model of its own, once, and the copy outlasts its source."""

from collections.abc import Iterator
from typing import Any

import pytest

from rollout_queue.commands.command import LoadWeights, SaveWeights
from rollout_queue.commands.result import CommandFailed
from tests.support.gateway.running import OTHER_KEY, Backends, RunningGateway
from tests.support.gateway.scripted_trainer import ScriptedTrainer, result_of, scripted_trainer
from tests.support.gateway.tinker_loop import SamplingLoop

DAY_S = 86400


@pytest.fixture
def trainer(gateway: RunningGateway) -> Iterator[ScriptedTrainer]:
    with scripted_trainer(gateway.redis) as running:
        yield running


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
    refused = loop.post("optim_step", {"model_id": made, "seq_id": 2, "adam_params": {}})
    assert "takes no more commands" in refused.json()["error"]["message"]
    deleted = loop.gateway.call(
        "DELETE",
        f"/api/v1/training_runs/{loop.model_id}/checkpoints/weights/x",
        key=None,
        headers={"x-api-key": loop.key},
    )
    assert deleted.status_code == 204
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
    assert copy(loop).status_code == 200


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
    trainer.result_of = lambda logged: (
        CommandFailed("there is no room", "user") if logged.number == 0 else result_of(logged)
    )
    failed = copy(loop)
    assert (failed.status_code, "there is no room" in failed.text) == (400, True)
    taken = copy(loop, model_seq_id=0)
    assert "made with other arguments" in taken.json()["error"]["message"]
