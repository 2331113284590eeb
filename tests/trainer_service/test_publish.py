"""Publishing: the gateway may be away, talk nonsense or know better; training loses nothing by it."""

import pytest

from tests.support.trainer_service.rig import MakeRig, Rig
from trainer_service.status.heartbeat import Stopped


def test_a_gateway_that_is_away_is_asked_again_and_loses_nothing(rig: Rig) -> None:
    rig.gateway.refusals = 3
    rig.agents.group("g", [1.0, 0.0])
    assert rig.trainer.run_once()
    assert [body["version"] for body in rig.gateway.announced] == [1]
    assert set(rig.session_codes().values()) == {"trained"}


def test_a_trainer_told_to_stop_while_the_gateway_is_away_publishes_after_its_restart(rig: Rig) -> None:
    rig.gateway.refusals = 10**6
    rig.agents.group("g", [1.0, 0.0])
    rig.shared_state.stop()
    with pytest.raises(Stopped):
        rig.trainer.run_once()
    assert rig.session_codes()["g-0"] == "trained", "a durable checkpoint contains it"
    rig.gateway.refusals = 0
    again = rig.restart()
    assert [body["version"] for body in rig.gateway.announced] == [1]
    assert not again.trainer.run_once()


def test_an_answer_in_a_proxys_words_is_asked_for_again(rig: Rig) -> None:
    rig.gateway.nonsense = 2  # to the question for the newest version, and to the announcement
    rig.agents.group("g", [1.0, 0.0])
    assert rig.trainer.run_once()
    assert [body["version"] for body in rig.gateway.announced] == [1]


def test_the_number_of_a_version_is_beyond_the_gateways(rig: Rig) -> None:
    rig.gateway.versions.append(41)
    rig.agents.group("g", [1.0, 0.0])
    rig.trainer.run_once()
    assert rig.trainer.version == 42
    assert rig.gateway.announced[0]["version"] == 42


def test_a_version_that_no_server_took_does_not_stop_the_next(rig: Rig) -> None:
    rig.gateway.server_ok = False
    for group_id in ("g", "h"):
        rig.agents.group(group_id, [1.0, 0.0])
        assert rig.trainer.run_once()
    assert [body["version"] for body in rig.gateway.announced] == [1, 2]
    assert set(rig.session_codes().values()) == {"trained"}


def test_a_number_that_somebody_took_stays_unpublished(rig: Rig) -> None:
    rig.gateway.conflict = True
    rig.agents.group("g", [1.0, 0.0])
    assert rig.trainer.run_once()
    assert set(rig.session_codes().values()) == {"trained"}


def published(make_rig: MakeRig, **gateway: object) -> list[int]:
    """The versions on disk after five steps of a trainer that keeps two."""
    rig = make_rig(keep_policies=2).start()
    for name, value in gateway.items():
        setattr(rig.gateway, name, value)
    for index in range(5):
        rig.agents.group(f"g{index}", [1.0, 0.0])
        assert rig.trainer.run_once()
    return rig.store.versions()


def test_old_versions_are_removed_when_newer_ones_are_served(make_rig: MakeRig) -> None:
    assert published(make_rig) == [4, 5]


def test_what_is_served_is_kept_and_all_that_is_newer(make_rig: MakeRig) -> None:
    assert published(make_rig, serving=2) == [2, 3, 4, 5]


def test_what_is_to_be_served_is_kept_though_another_is_served_yet(make_rig: MakeRig) -> None:
    assert published(make_rig, serving=4, target=3) == [3, 4, 5]


def test_nothing_is_removed_while_nobody_says_what_is_served(make_rig: MakeRig) -> None:
    assert published(make_rig, speechless=True) == [1, 2, 3, 4, 5]


def test_a_fleet_that_serves_nothing_needs_no_old_version(make_rig: MakeRig) -> None:
    assert published(make_rig, idle=True) == [4, 5]
