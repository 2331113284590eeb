"""The log of a service: its two forms, what hostile values in it do, and that it holds no secret."""

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import pytest
from fastapi import FastAPI

from rollout_queue.http.probe_routes import probes
from rollout_queue.service_log import MOST_BYTES, begin_log_ids, log_ids, of_turn
from rollout_queue.settings import ServiceSettings
from rollout_queue.starting import begin_log

logger = logging.getLogger("pump.valve")
HOSTILE = "a\nFAKE 2026 INFO gateway: all is well\r\x1b[2J\u2028\u202e\x85\ud800 end"


class LoggingPumpSettings(ServiceSettings):
    """The settings of a service that is not there."""

    section: ClassVar[str] = "pump"

    admin_keys: list[str] = []
    redis_url: str = ""


class Log:
    """The log of a service in this process."""

    def __init__(self, form: str, **settings: Any) -> None:
        self._stream = io.StringIO()
        begin_log(LoggingPumpSettings(log_format=form, **settings), "worker 1")
        handler = logging.getLogger().handlers[0]
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(self._stream)

    @property
    def lines(self) -> list[str]:
        return self._stream.getvalue().splitlines()

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root, hooks = logging.getLogger(), (sys.excepthook, threading.excepthook)
    handlers, level, httpx_level = root.handlers[:], root.level, logging.getLogger("httpx").level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("httpx").setLevel(httpx_level)
    sys.excepthook, threading.excepthook = hooks
    begin_log_ids()


def test_a_line_in_json_is_one_object_with_the_ids_that_are_known() -> None:
    log = Log("json")
    ids = begin_log_ids("request-1")
    ids.session_id = "session-1"
    with of_turn("turn-1"):
        logger.warning("the valve %s is %d", "left", 7)
    logger.info("later")
    first, second = log.objects
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "WARNING",
        "logger": "pump.valve",
        "message": "the valve left is 7",
        "process": "worker 1",
        "request_id": "request-1",
        "session_id": "session-1",
        "turn_id": "turn-1",
    }
    assert second["turn_id"] == "turn-1"
    begin_log_ids().step = 12
    logger.info("a step")
    assert log.objects[-1]["step"] == 12
    assert "request_id" not in log.objects[-1]


def test_concurrent_turns_of_one_call_have_lines_of_their_own() -> None:
    begin_log_ids("request-1", "session-1")
    with of_turn("turn-1"), of_turn("turn-2"):
        assert log_ids().fields()["turn_id"] == "turn-2"
        assert log_ids().fields()["request_id"] == "request-1"
    assert log_ids().turn_id == "turn-1"  # the first turn of the call, for the access log


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_hostile_value_makes_no_line_and_no_control_character(form: str) -> None:
    log = Log(form)
    begin_log_ids("request", HOSTILE)
    logger.info("session %s", HOSTILE)
    (line,) = log.lines
    assert line.isprintable()
    if form == "json":
        found = json.loads(line)
        assert found["message"] == f"session {HOSTILE}"
        assert found["session_id"] == HOSTILE
    else:
        assert r"a\nFAKE" in line
        assert r"\x1b[2J" in line


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_exception_makes_no_line_that_looks_like_an_entry(form: str) -> None:
    log = Log(form)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("it failed")
    if form == "json":
        (found,) = log.objects
        assert found["exception"].startswith("Traceback")
        assert HOSTILE in found["exception"]
    else:
        head, *trace = log.lines
        assert head.endswith("ERROR pump.valve: it failed")
        assert all(line.startswith("    ") and line.isprintable() for line in trace)
        assert any("FAKE" in line for line in trace)


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("letter", ["x", "\n", "語", "🙂", "\ud800"])
def test_a_line_is_bounded(form: str, letter: str) -> None:
    log = Log(form)
    begin_log_ids("request", letter * 10**5)
    logger.info("%s", letter * 10**5)
    (line,) = log.lines
    assert len(line.encode()) <= MOST_BYTES
    assert "characters" in line


SECRETS = ("a-secret-of-the-settings", "pass-word-of-redis", "a-presented-key", "another-presented-key")


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_secret_gets_into_the_log(form: str) -> None:
    log = Log(form, admin_keys=[SECRETS[0]])
    logger.info("admin %s", SECRETS[0])
    logger.info("redis://weir:%s@10.0.0.1:6379/0 does not answer", SECRETS[1])
    logger.info("headers %s", {"authorization": f"Bearer {SECRETS[2]}", "x-api-key": SECRETS[3]})
    try:
        raise ValueError(f"the keys are {SECRETS[0]}")
    except ValueError:
        logger.exception("it failed")
    begin_log_ids("request", SECRETS[0])
    logger.info("with ids")
    text = "\n".join(log.lines)
    assert not [secret for secret in SECRETS if secret in text]
    assert text.count("***") >= 5


async def test_a_service_that_is_ready_again_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rollout_queue.http.probe_routes")
    reasons = iter([None, None, "Redis failed", "Redis failed", None, None])

    async def readiness() -> str | None:
        return next(reasons)

    async def text() -> bytes:
        return b""

    app = FastAPI()
    app.include_router(probes(readiness, text))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weir") as client:
        found = [(await client.get("/ready")).status_code for _ in range(6)]
    assert found == [200, 200, 503, 503, 200, 200]
    assert [each.getMessage() for each in caplog.records] == ["ready again: it was not, because Redis failed"]
