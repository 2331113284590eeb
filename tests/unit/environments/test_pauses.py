"""How long the runner pauses when the gateway refuses it."""

from environments.session_client import LONGEST_PAUSE_S, pause_after


def test_the_gateways_wish_is_obeyed_however_often_it_was_told() -> None:
    for attempt in range(50):
        assert 2.0 <= pause_after(attempt, wished_s=2.0) <= 2.5


def test_without_a_wish_the_pauses_grow_to_a_bound() -> None:
    assert pause_after(0) < pause_after(5) <= pause_after(50) * 2 <= LONGEST_PAUSE_S * 2
