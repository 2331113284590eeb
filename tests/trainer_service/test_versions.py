"""A version number names one set of weights for ever, whatever was lost on the way."""

import shutil

import pytest

from tests.support.trainer_service.rig import MakeRig, Rig
from trainer_service.status.heartbeat import Stopped


def forget_policies(rig: Rig) -> None:
    shutil.rmtree(rig.settings.policies_dir)
    rig.settings.policies_dir.mkdir()


def train(rig: Rig, group_id: str) -> int:
    rig.agents.group(group_id, [1.0, 0.0])
    assert rig.trainer.run_once()
    return rig.trainer.version


def test_a_number_whose_weights_were_lost_in_a_crash_is_not_used_again(make_rig: MakeRig) -> None:
    """No checkpoint, no publication, no file: yet /status and the metrics have named those weights."""
    rig = make_rig(checkpoint_every_steps=10, publish_every_steps=10).start()
    lost = [train(rig, "g"), train(rig, "h")]
    rig = rig.restart()
    assert rig.trainer.version == 0
    assert rig.trainer.run_once()
    assert lost == [1, 2]
    assert rig.trainer.version == 3


def test_a_number_that_was_published_before_its_checkpoint_is_not_used_again(make_rig: MakeRig) -> None:
    """Even when the directory of versions is lost, and the gateway with its Redis."""
    rig = make_rig(checkpoint_every_steps=10).start()
    assert train(rig, "g") == 1
    forget_policies(rig)
    rig.gateway.versions = [0]
    rig = rig.restart()
    assert rig.trainer.run_once()
    assert [body["version"] for body in rig.gateway.announced] == [1, 2]


def test_an_older_checkpoint_is_followed_by_a_number_beyond_the_newest(make_rig: MakeRig) -> None:
    rig = make_rig().start()
    assert train(rig, "g") == 1
    kept = rig.root / "backup"
    shutil.copytree(rig.settings.checkpoint_dir, kept)
    assert [train(rig, "h"), train(rig, "i")] == [2, 3]
    shutil.rmtree(rig.settings.checkpoint_dir)
    kept.rename(rig.settings.checkpoint_dir)
    forget_policies(rig)
    rig = rig.restart()
    assert rig.trainer.version == 1
    assert train(rig, "j") == 4


def test_checkpoints_that_were_lost_are_followed_by_a_number_beyond_those_on_disk(make_rig: MakeRig) -> None:
    rig = make_rig().start()
    assert train(rig, "g") == 1
    shutil.rmtree(rig.settings.checkpoint_dir)
    rig.gateway.versions = [0]
    rig = rig.restart()
    assert train(rig, "h") == 2


def test_the_first_number_of_a_process_waits_for_the_gateway_and_nothing_is_trained_meanwhile(
    make_rig: MakeRig,
) -> None:
    """It alone may know what was published: here, both directories are lost."""
    rig = make_rig().start()
    assert train(rig, "g") == 1
    shutil.rmtree(rig.root)
    rig = rig.restart()
    rig.gateway.away = True
    rig.agents.group("h", [1.0, 0.0])
    before = rig.weights()
    rig.shared_state.stop()
    with pytest.raises(Stopped):
        rig.trainer.run_once()
    assert all(bool((before[name] == now).all()) for name, now in rig.weights().items())
    assert len(list(rig.stream.reclaim())) == 6
    rig.gateway.away = False
    assert rig.restart().trainer.run_once()
    assert [body["version"] for body in rig.gateway.announced] == [1, 2]


def test_a_number_that_was_given_away_since_the_gateway_was_asked_is_passed_over(rig: Rig) -> None:
    """By a gateway that is away now, or to a trainer whose disk is lost."""
    assert train(rig, "g") == 1
    rig.stream.reserve(7, "file:///elsewhere")
    assert [train(rig, "h"), train(rig, "i")] == [8, 9]
    assert [body["version"] for body in rig.gateway.announced] == [1, 8, 9]


def test_a_trainer_that_waits_for_the_gateways_numbers_says_so(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig().start()
    rig.gateway.away = True
    said: list[str] = []

    def sleep(_seconds: float) -> None:
        said.append(rig.shared_state.snapshot.waiting_for)
        rig.gateway.away = False

    monkeypatch.setattr(rig.shared_state, "sleep", sleep)
    assert train(rig, "g") == 1
    assert said[0].startswith("the gateway to say which versions it knows, since ConnectError")


def test_a_gateway_that_goes_away_later_is_not_waited_for(make_rig: MakeRig) -> None:
    rig = make_rig(publish_every_steps=10).start()
    assert train(rig, "g") == 1
    rig.gateway.away = True
    assert train(rig, "h") == 2


def test_a_crash_between_step_and_publish_publishes_the_same_weights_under_their_number(
    make_rig: MakeRig,
) -> None:
    rig = make_rig().start()
    rig.gateway.refusals = 10**6
    rig.agents.group("g", [1.0, 0.0])
    rig.shared_state.stop()
    with pytest.raises(Stopped):
        rig.trainer.run_once()
    made = rig.weights()
    rig.gateway.refusals = 0
    rig = rig.restart()
    assert [body["version"] for body in rig.gateway.announced] == [1]
    assert all(bool((made[name] == now).all()) for name, now in rig.weights().items())
    assert train(rig, "h") == 2
