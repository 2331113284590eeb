"""The program that starts an engine with a key hides the key in its log, and breaks no call that logs."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_server.engine.keyed import hide, main

ENGINE = """
import argparse
parser = argparse.ArgumentParser()
for name in ("--port", "--api-key"):
    parser.add_argument(name)
print(parser.parse_args())
"""


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


@pytest.mark.parametrize("key", ["a-key", "-key", "--port"])
def test_the_engine_gets_the_key_also_if_it_begins_like_an_option(
    key: str,
    hidden: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "key").write_text(key)
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["keyed.py", str(tmp_path / "key"), "--port", "1"])
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    main()
    assert capsys.readouterr().out == f"Namespace(port='1', api_key={key!r})\n"
    monkeypatch.delitem(sys.modules, "sglang")
