"""Every variable names a setting of its service, and the services find each other."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from gateway.settings import GatewaySettings
from rollout_queue.settings import SECRETS, SHORT_NAMES, ServiceSettings
from rollout_server.settings import RolloutServerSettings
from tests.support.kubernetes.pods import Pod, environment, secret_files
from tests.support.kubernetes.rendered import Object, named, of_kind
from tests.support.kubernetes.service_settings import settings_of
from trainer_service.settings import TrainerSettings
from weir.demo.settings import services_of_demo

KINDS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "rollout-server": RolloutServerSettings,
    "trainer": TrainerSettings,
}
OF_LIBRARIES = {"OMP_WAIT_POLICY", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}


@pytest.mark.parametrize("name", KINDS)
def test_every_variable_of_a_service_is_one_of_its_settings(pods: dict[str, Pod], name: str) -> None:
    kind = KINDS[name]
    known = {f"WEIR_{field.upper()}" for field in SHORT_NAMES & kind.model_fields.keys()}
    known |= {f"WEIR_{field.upper()}_FILE" for field in SECRETS & kind.model_fields.keys()}
    for variable in environment(pods[name].main).keys() - known - OF_LIBRARIES - {"WEIR_CONFIG"}:
        prefix, *path = variable.lower().split("__")
        assert prefix == f"weir_{kind.section}", variable
        fields = kind.model_fields
        for part in path:
            assert part in fields, variable
            fields = getattr(fields[part].annotation, "model_fields", {})


@pytest.mark.parametrize("name", KINDS)
def test_every_service_accepts_what_it_is_given(
    objects: list[Object], pods: dict[str, Pod], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(KINDS[name], pods[name], objects, tmp_path, monkeypatch)
    given = settings.model_dump()
    assert str(given["model_path"]) == "/model/policy"
    assert given["host"] == "0.0.0.0"
    assert given["rollout_server_key"]
    if name != "rollout-server":
        assert given["trainer_key"] not in (None, given["rollout_server_key"])
        assert given["admin_keys"]
    assert all(key.startswith("weir-admin-") for key in given["admin_keys"])
    if "redis_url" in given:
        assert urlsplit(given["redis_url"]).password


def settings_of_file(objects: list[Object]) -> dict[str, object]:
    """The sections of all services. Each is in a ConfigMap of its service, so that a change restarts one."""
    settings: dict[str, object] = {}
    for name, kind in KINDS.items():
        (found,) = (
            each
            for each in of_kind(objects, "ConfigMap").values()
            if re.fullmatch(rf"weir-{name}-\w+", each["metadata"]["name"])
        )
        assert found["metadata"]["labels"]["app.kubernetes.io/name"] == name
        section = yaml.safe_load(found["data"]["weir.yaml"])
        assert section.keys() == {kind.section}
        settings |= section
    return settings


def test_no_pod_gets_more_secrets_than_it_needs(pods: dict[str, Pod], objects: list[Object]) -> None:
    redis, keys = "weir-redis/redis_url", {"weir-keys/client_keys", "weir-keys/admin_keys"}
    server, trainer, engine = (
        f"weir-service-keys/{each}_key" for each in ("rollout_server", "trainer", "engine")
    )
    expected = {
        "redis": {"weir-redis/redis_password", "weir-redis/redis_password.conf"},
        "gateway": {redis, *keys, server, trainer, engine},
        "trainer": {redis, *keys, server, trainer},
        "rollout-server": {server, engine},
        "agent": {"weir-keys/client_keys"},
        "model": set(),
    }
    for name, pod in pods.items():
        files = secret_files(pod, objects).values()
        assert {source for each in files for source in each.values()} == expected[name], name
        for variable, value in environment(pod.main).items():
            assert not any(word in variable for word in ("KEY", "REDIS_URL")) or value.startswith(
                "/run/weir/"
            )


def test_every_address_is_that_of_a_service(objects: list[Object], pods: dict[str, Pod]) -> None:
    found = set()
    for pod in pods.values():
        for value in environment(pod.main).values():
            if value.startswith("http://"):
                url = urlsplit(value)
                service = named(objects, "Service", url.hostname or "")
                assert url.port in {port["port"] for port in service["spec"]["ports"]}
                found.add(url.hostname)
    assert found >= {"gateway-internal", "trainer"}


def test_versions_come_from_where_rollout_servers_look_for_them(
    objects: list[Object], pods: dict[str, Pod], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = settings_of(TrainerSettings, pods["trainer"], objects, tmp_path, monkeypatch)
    server = settings_of(RolloutServerSettings, pods["rollout-server"], objects, tmp_path, monkeypatch)
    assert trainer.publish_url == f"{server.trainer_url}/weights"
    for path in (trainer.checkpoint_dir, trainer.policies_dir, trainer.metrics_path):
        assert str(path).startswith("/var/lib/weir/trainer/")


def test_the_demo_has_the_settings_of_the_demo_and_no_section_is_unknown(
    overlays: dict[str, list[Object]],
) -> None:
    settings = {name: settings_of_file(objects) for name, objects in overlays.items()}
    expected = services_of_demo(0)
    assert settings["cpu-demo"].pop("gateway") == {}
    expected["rollout_server"] |= {"engine_device": "cpu", "boot_timeout_s": 3600}
    assert settings["cpu-demo"] == expected
