"""The published OpenAPI document: FastAPI's document of the REST routes, and the agents' paths.

FastAPI does not know the agents' paths, so their request bodies are described from the dialects' structs.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI

from gateway.dialects.chat_wire import ChatRequest
from gateway.dialects.completions_wire import CompletionRequest
from gateway.dialects.messages_wire import MessagesRequest
from gateway.dialects.responses_wire import ResponsesRequest
from gateway.dialects.token_ids_wire import TokenIdsRequest
from rollout_queue.http.api_page import REFUSED

JsonSchema = dict[str, Any]
"""A part of an OpenAPI document."""

BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": MessagesRequest,
    "/inference/v1/generate": TokenIdsRequest,
}
CONTRACTS: Mapping[str, tuple[str, list[str]]] = {
    "/v1/chat/completions": (
        "OpenAI's chat completion",
        ["id", "object", "created", "model", "choices", "usage"],
    ),
    "/v1/completions": ("OpenAI's completion", ["id", "object", "created", "model", "choices", "usage"]),
    "/v1/responses": ("OpenAI's response", ["id", "object", "created_at", "model", "output", "status"]),
    "/v1/messages": (
        "Anthropic's message",
        ["id", "type", "role", "model", "content", "stop_reason", "usage"],
    ),
    "/v1/messages/count_tokens": ("The number of tokens in the prompt", ["input_tokens"]),
    "/inference/v1/generate": ("vLLM's answer of token ids", ["request_id", "choices", "usage"]),
}
WITHOUT_STREAM = ("/v1/messages/count_tokens", "/inference/v1/generate")
ERROR: JsonSchema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
SESSION = {"name": "session_id", "in": "path", "required": True, "schema": {"type": "string"}}
STATUSES = (400, 401, 403, 404, 405, 408, 409, 410, 413, 415, 429, 431, 503, 504)
"""The statuses of error replies, which the document lists for every path. A 500 is a bug, and not listed."""


def openapi_document(app: FastAPI) -> JsonSchema:
    """The document, which is built at the first request for it."""
    if app.openapi_schema is None:
        document = _of_routes(app)
        for path in BODIES:
            document["paths"][path] = {"post": _agents_path(path)}
            document["paths"]["/sessions/{session_id}" + path] = {"post": _agents_path(path)}
        _, components = msgspec.json.schema_components(
            set(BODIES.values()), ref_template="#/components/schemas/{name}"
        )
        document["components"]["schemas"] |= {**components, "Error": ERROR}
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["responses"] |= _errors()
                if path.startswith(("/sessions/{session_id}/v1", "/sessions/{session_id}/inference")):
                    operation.setdefault("parameters", []).append(SESSION)
        app.openapi_schema = document
    return app.openapi_schema


def _of_routes(app: FastAPI) -> JsonSchema:
    """FastAPI's document without its own shape of a 422, which the gateway never sends."""
    document = FastAPI.openapi(app)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document


def _agents_path(path: str) -> JsonSchema:
    contract, required = CONTRACTS[path]
    reference = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
    content: JsonSchema = {"application/json": {"schema": {"type": "object", "required": required}}}
    if path not in WITHOUT_STREAM:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "tags": ["agent"],
        "summary": contract,
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
        "responses": {"200": {"description": contract, "content": content}},
    }


def _errors() -> JsonSchema:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": REFUSED, "content": content} for status in STATUSES}
