"""The images and the compose file keep the project's rules for privileges, networks and settings."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import GatewaySettings
from reward_service.settings import RewardSettings
from rollout_server.settings import EngineLoraSettings, RolloutServerSettings
from trainer_service.settings import TrainerSettings
from weir.demo.settings import services_of_demo

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
ONE_SHOTS = {"model", "redis_owner", "agent"}


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = document["services"]
    return found


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_runs_the_installed_wheel_as_an_unprivileged_user(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text.startswith("# syntax=")
    assert set(re.findall(r"^FROM (\S+)", text, re.M)) == {"python:3.11-slim-bookworm"}
    assert re.search(r"^USER 10001$", text, re.M)
    assert "PYTHONSAFEPATH=1" in text
    assert "pip install --no-deps /dist/*.whl" in text
    commands = re.split(r"&&|;|\n", text.replace("\\\n", " "))
    locked = [command for command in commands if "pip install" in command and " -r " in command]
    assert locked
    assert all("--require-hashes" in command for command in locked)


def test_only_the_gateway_and_the_reward_service_are_published_and_on_loopback_alone(
    services: dict[str, dict[str, Any]],
) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert list(published) == ["gateway", "reward_service"]
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_every_container_runs_without_privileges(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("read_only") or name == "redis_owner", name


def test_no_process_beside_the_reward_service_shows_its_keys_to_graders(
    services: dict[str, dict[str, Any]],
) -> None:
    service = services["reward_service"]
    assert service["init"] is False
    assert service["healthcheck"]["test"][:4] == ["CMD", "env", "-i", "/venv/bin/python"]


def test_every_service_is_watched_and_started_again(services: dict[str, dict[str, Any]]) -> None:
    for name in services.keys() - ONE_SHOTS:
        assert "healthcheck" in services[name], name
        assert services[name]["restart"] == "unless-stopped", name


def test_the_agent_reaches_nothing_but_the_gateway(services: dict[str, dict[str, Any]]) -> None:
    assert services["agent"]["networks"] == ["edge"]
    assert [name for name, service in services.items() if "edge" in service.get("networks", [])] == [
        "gateway",
        "agent",
    ]


def test_the_reward_service_starts_on_demand_and_reaches_nothing_of_weir_but_the_gateway(
    services: dict[str, dict[str, Any]],
) -> None:
    rewards = services["reward_service"]
    assert rewards["profiles"] == ["rewards"]
    assert [
        name for name, each in services.items() if set(each.get("networks", [])) & {*rewards["networks"]}
    ] == [
        "gateway",
        "reward_service",
    ]
    assert rewards["networks"] == ["rewards"]
    assert [volume["target"] for volume in rewards["volumes"] if volume["read_only"]] == [
        "/etc/weir/weir.yaml"
    ]
    assert not any(
        name == "reward_service" for each in services.values() for name in each.get("depends_on", {})
    )


def test_the_reward_service_of_compose_has_the_settings_of_a_reward_service(
    services: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weir.yaml"
    file.write_text(
        "rewards: {port: 9, gateway_url: 'http://elsewhere', "
        "rules: [{name: half, kind: python, source: 'def grade(sample, item): return 0.5'}]}\n"
    )
    image = (ROOT / "deploy" / "docker" / "rewards.Dockerfile").read_text(encoding="utf-8")
    for name, value in re.findall(r"(WEIR_\w+)=(\S+)", image):
        monkeypatch.setenv(name, value)
    for name, value in services["reward_service"]["environment"].items():
        monkeypatch.setenv(name, re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value))
    monkeypatch.setenv("WEIR_CONFIG", str(file))
    settings = RewardSettings()
    assert (settings.host, settings.port, settings.gateway_url) == ("0.0.0.0", 8300, "http://gateway:8000")
    assert settings.gateway_headers == {"authorization": "Bearer dev-admin-key"}
    assert [rule.name for rule in settings.rules] == ["half"]


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


def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_dir: str) -> TrainerSettings:
    """Run prepare.py in `tmp_path` without a warm start; return the settings that a trainer then reads."""
    config = tmp_path / "weir.yaml"
    monkeypatch.setenv("WEIR_MODEL_DIR", model_dir)
    script = runpy.run_path(str(ROOT / "deploy" / "docker" / "prepare.py"))
    names = script["main"].__globals__
    names |= {"MODEL_DIR": tmp_path, "CONFIG_PATH": config}
    names["model_for"] = lambda cache, seed, on_progress: (cache / "tool", True)
    script["main"]()
    monkeypatch.setenv("WEIR_CONFIG", str(config))
    return TrainerSettings()
