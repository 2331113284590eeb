"""The gateway publishes an OpenAPI document of all its paths."""

from gateway.app import create_app
from gateway.settings import GatewaySettings
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.serving import serving


def test_every_path_of_the_contract_is_published(gateway: RunningGateway) -> None:
    paths = gateway.get("/openapi.json").json()["paths"]
    for path in ("chat/completions", "completions", "responses", "messages", "messages/count_tokens"):
        assert {f"/v1/{path}", f"/sessions/{{session_id}}/v1/{path}"} <= set(paths)
    for path, operations in paths.items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"], (method, path)
            assert operation["responses"]["400"]["content"]["application/json"]["schema"] == {
                "$ref": "#/components/schemas/Error"
            }
    parameters = paths["/admin/export"]["get"]["parameters"]
    (form,) = [each for each in parameters if each["name"] == "format"]
    assert form["schema"]["enum"] == ["jsonl", "parquet", "verl", "trl", "openenv", "left_out"]


def test_every_endpoint_for_agents_is_published(gateway: RunningGateway, backends: Backends) -> None:
    agents = {
        path
        for path, operations in gateway.get("/openapi.json").json()["paths"].items()
        if path.startswith(("/v1/", "/inference/")) and "post" in operations and "{" not in path
    }
    app = create_app(GatewaySettings(redis_url=backends.redis_url, model_path=backends.model_path))
    with serving(app):
        assert set(app.endpoints) == agents != set()
