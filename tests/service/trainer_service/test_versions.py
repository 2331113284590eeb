"""A version number names one set of weights for ever, whatever was lost on the way."""

import shutil

import pytest

from tests.support.trainer_service.harness import Harness, MakeHarness
from trainer_service.status.heartbeat import Stopped


def forget_policies(harness: Harness) -> None:
    shutil.rmtree(harness.settings.policies_dir)
    harness.settings.policies_dir.mkdir()


def train(harness: Harness, group_id: str) -> int:
    harness.agents.group(group_id, [1.0, 0.0])
    assert harness.trainer.run_once()
    return harness.trainer.version


def test_a_number_whose_weights_were_lost_in_a_crash_is_not_used_again(make_harness: MakeHarness) -> None:
    """No checkpoint and no file has these weights, but /status and the metrics have named their version."""
    harness = make_harness(checkpoint_every_steps=10, publish_every_steps=10).start()
    lost = [train(harness, "g"), train(harness, "h")]
    harness = harness.restart()
    assert harness.trainer.version == 0
    assert harness.trainer.run_once()
    assert lost == [1, 2]
    assert harness.trainer.version == 3


def test_a_number_that_was_published_before_its_checkpoint_is_not_used_again(
    make_harness: MakeHarness,
) -> None:
    """This holds even if the directory of versions is lost, and the gateway with its Redis as well."""
    harness = make_harness(checkpoint_every_steps=10).start()
    assert train(harness, "g") == 1
    forget_policies(harness)
    harness.gateway.versions = [0]
    harness = harness.restart()
    assert harness.trainer.run_once()
    assert [body["version"] for body in harness.gateway.announced] == [1, 2]


def test_an_older_checkpoint_is_followed_by_a_number_beyond_the_newest(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    assert train(harness, "g") == 1
    kept = harness.root / "backup"
    shutil.copytree(harness.settings.checkpoint_dir, kept)
    assert [train(harness, "h"), train(harness, "i")] == [2, 3]
    shutil.rmtree(harness.settings.checkpoint_dir)
    kept.rename(harness.settings.checkpoint_dir)
    forget_policies(harness)
    harness = harness.restart()
    assert harness.trainer.version == 1
    assert train(harness, "j") == 4


def test_checkpoints_that_were_lost_are_followed_by_a_number_beyond_those_on_disk(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness().start()
    assert train(harness, "g") == 1
    shutil.rmtree(harness.settings.checkpoint_dir)
    harness.gateway.versions = [0]
    harness = harness.restart()
    assert train(harness, "h") == 2


def test_the_first_number_of_a_process_waits_for_the_gateway_and_nothing_is_trained_meanwhile(
    make_harness: MakeHarness,
) -> None:
    """Both directories are lost here, so that only the gateway knows which versions were published."""
    harness = make_harness().start()
    assert train(harness, "g") == 1
    shutil.rmtree(harness.root)
    harness = harness.restart()
    harness.gateway.away = True
    harness.agents.group("h", [1.0, 0.0])
    before = harness.weights()
    harness.shared_state.stop()
    with pytest.raises(Stopped):
        harness.trainer.run_once()
    assert all(bool((before[name] == now).all()) for name, now in harness.weights().items())
    assert len(list(harness.stream.reclaim())) == 6
    harness.gateway.away = False
    assert harness.restart().trainer.run_once()
    assert [body["version"] for body in harness.gateway.announced] == [1, 2]


def test_a_number_that_was_reserved_meanwhile_is_skipped(
    harness: Harness,
) -> None:
    """For example, a trainer whose disk is lost now may have reserved it."""
    assert train(harness, "g") == 1
    harness.stream.reserve(7, "file:///elsewhere")
    assert [train(harness, "h"), train(harness, "i")] == [8, 9]
    assert [body["version"] for body in harness.gateway.announced] == [1, 8, 9]


def test_a_trainer_that_waits_for_the_gateways_numbers_says_so(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness().start()
    harness.gateway.away = True
    said: list[str] = []

    def sleep(_seconds: float) -> None:
        said.append(harness.shared_state.snapshot.waiting_for)
        harness.gateway.away = False

    monkeypatch.setattr(harness.shared_state, "sleep", sleep)
    assert train(harness, "g") == 1
    assert said[0].startswith("the gateway to say which versions it knows (ConnectError")


def test_a_gateway_that_goes_away_later_is_not_waited_for(make_harness: MakeHarness) -> None:
    harness = make_harness(publish_every_steps=10).start()
    assert train(harness, "g") == 1
    harness.gateway.away = True
    assert train(harness, "h") == 2


def test_a_crash_between_step_and_publish_publishes_the_same_weights_under_their_number(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness().start()
    harness.gateway.refusals = 10**6
    harness.agents.group("g", [1.0, 0.0])
    harness.shared_state.stop()
    with pytest.raises(Stopped):
        harness.trainer.run_once()
    made = harness.weights()
    harness.gateway.refusals = 0
    harness = harness.restart()
    assert [body["version"] for body in harness.gateway.announced] == [1]
    assert all(bool((made[name] == now).all()) for name, now in harness.weights().items())
    assert train(harness, "h") == 2
