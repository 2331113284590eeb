"""A service whose settings cannot be read ends with one sentence."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from gateway.settings.service import GatewaySettings
from rollout_queue.http.starting import start
from rollout_queue.settings import ServiceSettings


class PumpSettings(ServiceSettings):
    """The settings of a service that is not there."""

    section: ClassVar[str] = "pump"
    retired: ClassVar[frozenset[str]] = frozenset({"lever"})

    strokes: list[int] = []


@pytest.mark.parametrize(
    ("written", "variable", "why"),
    [
        ("pump: {strokes: [1, x]}", "", "pump.strokes.1: Input should be a valid integer"),
        ("pump: {}", "[1", 'pump: .*"strokes".*delimiter'),
        ("pump: 7", "", "the section 'pump' has no fields"),
        ("7", "", "has no sections"),
        ("pump: [", "", "cannot be read"),
    ],
)
def test_settings_that_cannot_be_read_are_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: str, variable: str, why: str
) -> None:
    file = tmp_path / "weir.yaml"
    file.write_text(written)
    monkeypatch.setenv("WEIR_CONFIG", "elsewhere")
    if variable:
        monkeypatch.setenv("WEIR_PUMP__STROKES", variable)
    monkeypatch.setattr("sys.argv", ["pump", "--config", str(file)])
    with pytest.raises(SystemExit, match=why):
        start("pump", "A test.", PumpSettings)


def test_the_settings_of_the_named_file_are_returned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "weir.yaml"
    file.write_text("pump: {strokes: [1, 2]}")
    monkeypatch.setenv("WEIR_CONFIG", "elsewhere")
    monkeypatch.setattr("sys.argv", ["pump", "--config", str(file)])
    assert start("pump", "A test.", PumpSettings).strokes == [1, 2]


def test_a_setting_of_a_former_version_is_told_and_does_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "weir.yaml").write_text("pump: {lever: long, strokes: [1]}")
    monkeypatch.setenv("WEIR_CONFIG", str(tmp_path / "weir.yaml"))
    assert PumpSettings() == PumpSettings(strokes=[1])
    assert "pump.lever has no effect any more" in caplog.text


def test_a_gateway_starts_with_the_settings_that_it_had(tmp_path: Path) -> None:
    former: dict[str, Any] = {"engine_http": "aiohttp", "redis_connection": "pooled"}
    assert GatewaySettings(model_path=tmp_path, **former) == GatewaySettings(model_path=tmp_path)
