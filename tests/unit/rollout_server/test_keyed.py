"""The program that starts an engine with a key hides the key in its log, and breaks no call that logs."""

import logging
from collections.abc import Iterator

import pytest

from rollout_server.engine.keyed import hide


@pytest.fixture
def hidden() -> Iterator[None]:
    before = logging.getLogRecordFactory()
    hide("a-secret")
    yield
    logging.setLogRecordFactory(before)


def test_the_key_is_in_no_record(hidden: None, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("engine").warning("arguments: %s", {"api_key": "a-secret"})
    assert caplog.messages == ["arguments: {'api_key': '***'}"]


def test_a_message_whose_arguments_do_not_fit_harms_only_itself(hidden: None) -> None:
    logger, handler = logging.Logger("engine"), logging.NullHandler()
    logger.addHandler(handler)
    logger.warning("%d of %d", "one")
