"""The command line: an error is one sentence, and `weir config` prints all settings."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from weir.__main__ import app, main
from weir.stack import supervisor
from weir.stack.state import ProcessState, StackState

runner = CliRunner()


@pytest.fixture(autouse=True)
def own_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_STACK__RUN_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("WEIR_MODEL_PATH", raising=False)


def test_config_is_complete_and_tells_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "weir.yaml"
    file.write_text(
        "gateway: {port: 8351, admin_keys: [hush], redis_url: 'redis://:hush@hush@host/0'}\ngate: {}\n"
        "rewards: {judge: {base_url: 'http://u:hush@host/v1', api_key: hush}, rules: ["
        "{name: far, kind: http, url: 'http://host/?a=1&password=hush', api_key: hush}]}\n"
        "rollout_server: {model_path: m, engine_args: [--api-key, hush, --admin-api-key=hush, --tp, '2']}\n"
        "trainer: {redis_url: 'redis://host/0?password=hush', otel: {headers: {key: hush}}}\n"
    )
    shown = runner.invoke(app, ["config", "--config", str(file)], env={"WEIR_CONFIG": None})
    assert shown.exit_code == 0, shown.output
    assert "hush" not in shown.output
    assert "no service reads the section 'gate'" in shown.output
    document = yaml.safe_load(shown.output)
    assert list(document) == ["gateway", "rollout_server", "trainer", "rewards", "fine_tuning", "stack"]
    assert document["gateway"]["port"] == document["stack"]["gateway_port"] == 8351
    assert document["gateway"]["redis_url"] == document["trainer"]["redis_url"] == "redis://host/0"
    assert document["rewards"]["rules"][0]["url"] == "http://host/?a=1"
    left_out = re.search("# left out, because secret: (.*)", shown.output)
    assert left_out
    assert set(left_out[1].split(", ")) == {
        *("gateway.admin_keys", "gateway.redis_url"),
        *(f"rollout_server.engine_args.{number}" for number in range(3)),
        *("trainer.otel.headers", "trainer.redis_url", "rewards.judge.api_key", "rewards.judge.base_url"),
        *("rewards.rules.0.api_key", "rewards.rules.0.url"),
    }
    assert document["rollout_server"]["engine_args"] == ["--tp", "2"]
    assert "admin_keys" not in document["gateway"], "asterisks in its place would be a key that all know"
    assert "***" not in shown.output


def test_what_config_writes_configures_the_same(tmp_path: Path) -> None:
    file = tmp_path / "weir.yaml"
    file.write_text(runner.invoke(app, ["config"]).output)
    again = runner.invoke(app, ["config", "--config", str(file)], env={"WEIR_CONFIG": None})
    assert again.output == file.read_text()


def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    status = runner.invoke(app, ["status"])
    assert (status.exit_code, "no services run in" in status.output) == (1, True)
    result = runner.invoke(app, ["up", "--model-path", str(tmp_path / "nowhere")])
    assert result.exit_code == 1
    assert "is not a Hugging Face directory" in str(result.exception)
    assert "is not a Hugging Face directory" in runner.invoke(app, ["status"]).output
    down = runner.invoke(app, ["down"])
    assert (down.exit_code, "no services run in" in down.output) == (0, True)


def test_up_says_what_it_waits_for_also_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waited(_: object, __: object, on_wait: Callable[[str], None]) -> StackState:
        on_wait("gateway: it is starting")
        on_wait("rollout_server: no engine is ready")
        return StackState(parent=ProcessState.of(0), phase="up")

    monkeypatch.setattr(supervisor, "start_detached", lambda _: None)
    monkeypatch.setattr(supervisor, "wait_up", waited)
    shown = runner.invoke(app, ["up", "--model-path", str(tmp_path)]).output
    assert [line for line in shown.splitlines() if "waiting" in line] == [
        "waiting for gateway: it is starting",
        "waiting for rollout_server: no engine is ready",
    ]
    assert str(tmp_path / "run" / "logs") in shown


@pytest.mark.parametrize("written", ["rewards: [1]", "[gateway]", "gateway: {"])
def test_a_malformed_configuration_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], written: str
) -> None:
    file = tmp_path / "weir.yaml"
    file.write_text(written)
    monkeypatch.setattr("sys.argv", ["weir", "up", "--config", str(file)])
    monkeypatch.setenv("WEIR_CONFIG", str(file))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"weir: {file}")
