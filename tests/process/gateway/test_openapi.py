"""The gateway behaves as its OpenAPI document says: schemathesis finds no 500 and no undocumented answer."""

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gateway.app import create_app
from gateway.settings.service import GatewaySettings
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends
from tests.support.serving import serving

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
CONFIG = Path(__file__).with_name("schemathesis.toml")


def test_every_path_of_the_contract_is_published(backends: Backends) -> None:
    with backends.gateway() as gateway:
        paths = gateway.get("/openapi.json").json()["paths"]
    for path in ("chat/completions", "completions", "responses", "messages", "messages/count_tokens"):
        assert {f"/v1/{path}", f"/sessions/{{session_id}}/v1/{path}"} <= set(paths)
    for path, operations in paths.items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"], (method, path)
            assert operation["responses"]["400"]["content"]["application/json"]["schema"] == {
                "$ref": "#/components/schemas/Error"
            }


def test_every_endpoint_for_agents_is_published(backends: Backends) -> None:
    settings = GatewaySettings(redis_url=backends.redis_url, model_path=backends.model_path)
    app = create_app(settings)
    with serving(app) as url:
        paths = httpx.get(f"{url}/openapi.json", timeout=120).json()["paths"]
        agents = {
            path
            for path, operations in paths.items()
            if path.startswith(("/v1/", "/inference/")) and "post" in operations and "{" not in path
        }
        assert set(app.endpoints) == agents != set()


@pytest.mark.parametrize(
    ("paths", "key"),
    [
        ("^/(v1|inference|sessions|groups|live|ready|metrics)", CLIENT_KEY),
        pytest.param("^/api", CLIENT_KEY, marks=pytest.mark.long),
        ("^/admin", ADMIN_KEY),
    ],
    ids=["agent", "tinker", "operator"],
)
def test_schemathesis_finds_no_500_and_no_undocumented_shape(
    backends: Backends, paths: str, key: str, tmp_path: Path
) -> None:
    with backends.gateway() as gateway:
        command = [str(SCHEMATHESIS), "--config-file", str(CONFIG), "run", f"{gateway.url}/openapi.json"]
        command += ["--include-path-regex", paths, "-H", f"Authorization: Bearer {key}"]
        command += ["--max-examples", "3", "--seed", "7", "--suppress-health-check", "all"]
        command += ["--exclude-path", "/api/v1/forward_backward"]  # its body is protobuf
        command += ["--generation-database", ":memory:", "--no-color"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=tmp_path)
        tested = re.search(r"Tested: (\d+)", run.stdout)
        assert run.returncode == 0, run.stdout[-6000:]
        assert tested is not None
        assert int(tested[1]) >= 9
        assert gateway.get("/live").status_code == 200
