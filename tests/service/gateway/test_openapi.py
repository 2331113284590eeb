"""The gateway publishes an OpenAPI document of all its paths."""

import httpx

from gateway.app import create_app
from gateway.settings.service import GatewaySettings
from tests.support.gateway.running import Backends
from tests.support.serving import serving


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
