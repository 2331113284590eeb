"""Settings of services: secrets in files, addresses of Redis, and what is refused in one sentence."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gateway.settings import GatewaySettings
from rollout_queue.config_file import MalformedSettings
from rollout_queue.redis.settings import WriterRedisSettings, read_address
from rollout_queue.settings import MOST_SECRET_BYTES, ServiceSettings, check_names, read_settings
from rollout_queue.starting import start
from rollout_server.settings import RolloutServerSettings
from weir.configuration import service_settings


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "admin_keys"
    monkeypatch.setenv("WEIR_ADMIN_KEYS_FILE", str(path))
    return path


def settings(model: Path = Path("m")) -> GatewaySettings:
    return read_settings(GatewaySettings, model_path=model)


def test_a_file_has_one_key_a_line_or_several_with_commas(keys: Path) -> None:
    keys.write_text("one\n two,three \n\n")
    assert settings().admin_keys == ["one", "two", "three"]
    assert RolloutServerSettings(model_path=Path("m")).admin_keys == ["one", "two", "three"]


def test_it_wins_over_weir_yaml_and_a_services_own_variable_wins_over_it(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.write_text("from-file")
    (tmp_path / "weir.yaml").write_text("gateway: {admin_keys: [from-yaml]}\n")
    monkeypatch.setenv("WEIR_CONFIG", str(tmp_path / "weir.yaml"))
    assert settings().admin_keys == ["from-file"]
    monkeypatch.setenv("WEIR_GATEWAY__ADMIN_KEYS", "own")
    assert settings().admin_keys == ["own"]


def test_the_address_of_redis_may_have_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text("redis://:secret@redis:6379/0\n")
    monkeypatch.setenv("WEIR_REDIS_URL_FILE", str(tmp_path / "url"))
    assert settings().redis_url == "redis://:secret@redis:6379/0"


@pytest.mark.parametrize("name", WriterRedisSettings.model_fields)
def test_each_field_of_redis_has_a_variable_for_all_services(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"redis_url": "redis://elsewhere:1/2", "redis_key_prefix": "other", "redis_wait_timeout_s": "2.5"}
    given |= {"redis_check_hostname": "false", "redis_wait_replicas": "2"}
    value = given.get(name, "a/file")
    monkeypatch.setenv(f"WEIR_{name.upper()}", value)
    assert str(getattr(settings(), name)).lower() == value


def test_a_secret_that_cannot_be_read_opens_nothing(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway without keys is open to every process of its machine."""
    for content, fault in (
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b" \n,\n"[:2], "is empty"),
        (b"\xff", "is not UTF-8"),
        (b"x" * (MOST_SECRET_BYTES + 1), "is larger than"),
    ):
        if content is not None:
            keys.write_bytes(content)
        with pytest.raises(MalformedSettings, match=f"WEIR_ADMIN_KEYS_FILE: .*{fault}"):
            settings()
    monkeypatch.setenv("WEIR_ADMIN_KEYS", "another")
    with pytest.raises(MalformedSettings, match="are both set"):
        settings()


@pytest.mark.parametrize(
    ("section", "value", "sentence"),
    [
        ("lora", {"max_loaded": 6}, "rollout_server.lora: max_loaded (6) must be at least max_per_batch (8)"),
        (
            "port",
            "x",
            "rollout_server.port: Input should be a valid integer, unable to parse string as an integer",
        ),
        ("engine_args", ["--api-key"], "rollout_server.engine_args: with an engine_key, give no --api-key"),
    ],
)
def test_a_fault_in_the_settings_is_one_sentence(section: str, value: object, sentence: str) -> None:
    given: dict[str, object] = {"model_path": "m", "engine_key": "k" * 20, section: value}
    with pytest.raises(MalformedSettings) as fault:
        read_settings(RolloutServerSettings, **given)
    assert str(fault.value) == sentence


@pytest.mark.parametrize("kind", service_settings(), ids=lambda kind: kind.section)
@pytest.mark.parametrize("key", ["***", "*", " ****\t"])
def test_what_stands_for_a_key_in_logs_is_no_key(kind: type[ServiceSettings], key: str) -> None:
    lists = {"client_keys", "admin_keys"} & kind.model_fields.keys()
    texts = {"rollout_server_key", "trainer_key", "engine_key"} & kind.model_fields.keys()
    assert lists
    for field in lists | texts:
        required = {"model_path": "m"} if "model_path" in kind.model_fields else {}
        with pytest.raises(MalformedSettings) as refused:
            read_settings(kind, **required, **{field: ["good", key] if field in lists else key})
        assert str(refused.value).startswith(f"{kind.section}.{field}: ")


@pytest.mark.parametrize(
    "url", ["http://h", "redis+other://h", "unix+cluster:///run/redis.sock", "", "h:6379"]
)
def test_an_address_with_an_unknown_scheme_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="give redis://, rediss://"):
        read_address(url)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+sentinel://h1,h2", "name the master"),
        ("redis://h1,h2", "one host"),
        ("redis+cluster://h1/1", "no databases but 0"),
        ("redis://h:port", "host:port"),
    ],
)
def test_an_address_that_contradicts_itself_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_address(url)


class PumpSettings(ServiceSettings):
    """The settings of a service that is not there."""

    section: ClassVar[str] = "pump"
    retired: ClassVar[Mapping[str, str]] = {"lever": "strokes say how far it moves"}

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
    assert "pump.lever has no effect any more: remove it; strokes say how far it moves" in caplog.text
    caplog.clear()
    monkeypatch.delenv("WEIR_CONFIG")
    monkeypatch.setenv("WEIR_PUMP__LEVER", "long")
    assert PumpSettings(strokes=[1]).strokes == [1]
    assert "pump.lever has no effect any more: remove it; strokes say how far it moves" in caplog.text


def test_what_others_set_is_no_unknown_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets the first ones for services whose names begin with weir."""
    for name, value in {
        "WEIR_GATEWAY_PORT": "tcp://10.0.0.1:8000",
        "WEIR_GATEWAY_PORT_8000_TCP_ADDR": "10.0.0.1",
        "WEIR_GATEWAY_SERVICE_PORT_HTTP": "8000",
        "WEIR_SERVICE_HOST": "10.0.0.1",
        "WEIR_REDIS_MEMORY": "2gb",
        "WEIR_TRAINER__SEED": "7",
        "WEIR_TRAINER__UNKNOWN_HERE": "7",
        "WEIR_GATEWAY__ENGINE_HTTP": "aiohttp",
        "WEIR_ADMIN_KEYS_FILE": "keys",
        "weir_gateway__port": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert check_names(GatewaySettings) == []
    with pytest.raises(MalformedSettings, match=r"WEIR_TRAINER__UNKNOWN_HERE: there is no such setting"):
        check_names(*service_settings())
    monkeypatch.setenv("WEIR_GATEWAY_HOST", "h")
    assert check_names(GatewaySettings) == [
        "WEIR_GATEWAY_HOST is set, and nothing here reads it; did you mean WEIR_GATEWAY__HOST?"
    ]


def test_a_gateway_starts_with_the_settings_that_it_had(tmp_path: Path) -> None:
    former: dict[str, Any] = {"engine_http": "aiohttp", "redis_connection": "pooled"}
    assert GatewaySettings(model_path=tmp_path, **former) == GatewaySettings(model_path=tmp_path)
