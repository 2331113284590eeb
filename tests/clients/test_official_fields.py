"""Every field in the types of OpenAI's and Anthropic's SDKs is served, accepted, or refused by its name.

The bodies are made in the SDK's own environment, so a newer release brings its new fields along.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from gateway.app import create_app
from gateway.settings import GatewaySettings
from tests.support.clients.stack import ENVIRONMENTS, ROOT
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.images import noise_url
from tests.support.serving import serving
from tests.support.tiny_vision_model import make_tiny_vision_model
from tests.support.waiting import wait_until

SCRIPT = ROOT / "tests" / "support" / "clients" / "official_bodies.py"
HI: Any = {"role": "user", "content": "hi"}
SCHEMA: Any = {"type": "object"}
TOOLS: dict[str, Any] = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "x", "parameters": SCHEMA}},
    "/v1/responses": {"type": "function", "name": "x", "parameters": SCHEMA},
    "/v1/messages": {"name": "x", "input_schema": SCHEMA},
}
URL = noise_url()
SHOWN = {"url": URL, "image_url": URL, "data": URL.partition(",")[2], "signature": ""}
"""By the name of a field: an image in place of any text, and no signature, which only the gateway makes."""
NEEDED: dict[str, dict[str, Any]] = {"function_call_output": {"call_id": "x"}, "assistant": {"content": "x"}}
"""By an object's type or role: what its contract needs, though its type does not say so."""


def sound(value: Any) -> Any:
    """The value with what the contract needs beside its types."""
    if isinstance(value, list):
        return [sound(each) for each in value]
    if not isinstance(value, dict):
        return value
    made: dict[str, Any] = {
        name: SHOWN.get(name, each) if each == "x" else sound(each) for name, each in value.items()
    }
    needed = NEEDED.get(str(made.get("type") or made.get("role")), {})
    if "json_schema" in made:
        made["json_schema"] = {"name": "x", "schema": SCHEMA} | made["json_schema"]
    if made.get("type") == "base64" and "media_type" in made:
        made["media_type"] = "image/png"
    return needed | made


def completed(path: str, body: dict[str, Any]) -> dict[str, Any]:
    body = sound(body)
    if path == "/v1/responses":
        body = {"input": "hi"} | body
    if "messages" in body:
        body["messages"] = [HI, *body["messages"], HI]
    if "tool_choice" in body:
        body["tools"] = [TOOLS[path]]
    if "function_call" in body:
        body["functions"] = [{"name": "x"}]
    if "top_logprobs" in body and path == "/v1/chat/completions":
        body["logprobs"] = True
    return body


def bodies(sdk: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    python = ENVIRONMENTS / f"{sdk}_python" / "bin" / "python"
    done = subprocess.run([python, SCRIPT, sdk], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        given = json.loads(line)
        path, field = given["path"], given["field"].replace("messages[0]", "messages[1]", 1)
        yield path, field, completed(path, given["body"])


def fault(reply: Any, field: str) -> str:
    """What is wrong with the reply to a body with this field: empty if the field is known."""
    if reply.status_code == 200 or (reply.status_code == 404 and field == "previous_response_id"):
        return ""
    error = reply.json()["error"]
    param = error["param"] or ""
    holder = param.rpartition(".")[0]  # an object is refused for its type
    related = field.startswith((param, holder)) if holder else field.split(".")[0].startswith(param)
    if reply.status_code == 400 and error["code"] != "unknown_parameter" and param and related:
        return ""
    return f"{reply.status_code} {error['message']}"


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_no_official_field_is_unknown(
    redis_url: str, tiny_model: Path, tmp_path: Path, sdk: str, sees: bool
) -> None:
    """With a model that `sees`, of the bodies with images."""
    model = make_tiny_vision_model(tmp_path / "model") if sees else tiny_model
    engine = FakeEngine(Tokenizer.from_file(str(model / "tokenizer.json")))
    given = [each for each in bodies(sdk) if not sees or "image" in json.dumps(each)]
    with serving(engine.app()) as engine_url:
        settings = GatewaySettings(
            redis_url=redis_url, model_path=model, engines=[engine_url], unknown_fields="refuse"
        )
        with serving(create_app(settings)) as url, httpx.Client(base_url=url, timeout=120) as http:
            wait_until(lambda: http.get("/ready").status_code == 200)
            replies = [http.post(path, json=body) for path, _, body in given]
    fields = [f"{path} {field}" for path, field, _ in given]
    faults = [fault(reply, field) for (_, field, _), reply in zip(given, replies, strict=True)]
    assert {field: why for field, why in zip(fields, faults, strict=True) if why} == {}
    assert sees or sum(reply.status_code == 200 for reply in replies) > 200
