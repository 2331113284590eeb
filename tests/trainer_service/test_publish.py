"""Publishing: training loses nothing if the gateway is away, answers nonsense, or has a newer version."""

import pytest

from tests.support.trainer_service.harness import Harness, MakeHarness
from trainer_service.status.heartbeat import Stopped


def test_a_gateway_that_is_away_is_asked_again_and_loses_nothing(harness: Harness) -> None:
    harness.gateway.refusals = 3
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert [body["version"] for body in harness.gateway.announced] == [1]
    assert set(harness.session_codes().values()) == {"trained"}


def test_a_trainer_told_to_stop_while_the_gateway_is_away_publishes_after_its_restart(
    harness: Harness,
) -> None:
    harness.gateway.refusals = 10**6
    harness.agents.group("g", [1.0, 0.0])
    harness.shared_state.stop()
    with pytest.raises(Stopped):
        harness.trainer.run_once()
    assert harness.session_codes()["g-0"] == "trained", "a durable checkpoint contains it"
    harness.gateway.refusals = 0
    again = harness.restart()
    assert [body["version"] for body in harness.gateway.announced] == [1]
    assert not again.trainer.run_once()


def test_a_request_that_a_proxy_answered_is_repeated(harness: Harness) -> None:
    harness.gateway.nonsense = 2  # for the request for the newest version, and for the announcement
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert [body["version"] for body in harness.gateway.announced] == [1]


def test_the_number_of_a_version_is_beyond_the_gateways(harness: Harness) -> None:
    harness.gateway.versions.append(41)
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run_once()
    assert harness.trainer.version == 42
    assert harness.gateway.announced[0]["version"] == 42


def test_a_version_that_no_server_took_does_not_stop_the_next(harness: Harness) -> None:
    harness.gateway.server_ok = False
    for group_id in ("g", "h"):
        harness.agents.group(group_id, [1.0, 0.0])
        assert harness.trainer.run_once()
    assert [body["version"] for body in harness.gateway.announced] == [1, 2]
    assert set(harness.session_codes().values()) == {"trained"}


def test_a_version_whose_number_is_taken_is_not_published(harness: Harness) -> None:
    harness.gateway.conflict = True
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert set(harness.session_codes().values()) == {"trained"}


def published(make_harness: MakeHarness, **gateway: object) -> list[int]:
    """The versions on disk after five steps of a trainer that keeps two."""
    harness = make_harness(keep_policies=2).start()
    for name, value in gateway.items():
        setattr(harness.gateway, name, value)
    for index in range(5):
        harness.agents.group(f"g{index}", [1.0, 0.0])
        assert harness.trainer.run_once()
    return harness.store.versions()


def test_old_versions_are_removed_when_newer_ones_are_served(make_harness: MakeHarness) -> None:
    assert published(make_harness) == [4, 5]


def test_the_served_version_is_kept(make_harness: MakeHarness) -> None:
    assert published(make_harness, serving=2) == [2, 4, 5]


def test_the_version_that_is_served_next_is_kept(make_harness: MakeHarness) -> None:
    assert published(make_harness, serving=4, target=3) == [3, 4, 5]


def test_no_version_is_removed_while_the_gateway_does_not_say_which_it_needs(
    make_harness: MakeHarness,
) -> None:
    assert published(make_harness, speechless=True) == [1, 2, 3, 4, 5]


def test_a_fleet_that_serves_nothing_needs_no_old_version(make_harness: MakeHarness) -> None:
    assert published(make_harness, idle=True) == [4, 5]
