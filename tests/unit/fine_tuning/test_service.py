"""What the service refuses at its start and of bodies, and what it asks of the gateway."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from fine_tuning.__main__ import main
from fine_tuning.app import create_app
from fine_tuning.served_versions import GatewayRefused, GatewaySilent, PolicyWatch, answered
from fine_tuning.settings import FineTuningSettings


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("{sampling: {n: 2}}", "fine_tuning.sampling: .*n cannot be set here"),
        ("{client_keys: [guest]}", "fine_tuning.admin_keys: set one"),
    ],
)
def test_settings_that_can_serve_nobody_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, reason: str
) -> None:
    for name in ("WEIR_CLIENT_KEYS", "WEIR_ADMIN_KEYS"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "weir.yaml"
    file.write_text(f"fine_tuning: {section}")
    monkeypatch.setenv("WEIR_CONFIG", str(file))
    monkeypatch.setattr("sys.argv", ["fine_tuning"])
    with pytest.raises(SystemExit, match=reason):
        main()


# Bodies: a stranger's is not read, and only an upload may be large


LARGE = 5 * 2**20


class Call:
    """One request to the application, which counts the pieces of the body that were read."""

    def __init__(self, path: str, key: str, body_bytes: int) -> None:
        headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }
        self.left, self.read, self.status = body_bytes, 0, 0

    async def receive(self) -> dict[str, Any]:
        piece = b" " * min(self.left, 2**20)
        self.left -= len(piece)
        self.read += 1
        return {"type": "http.request", "body": piece, "more_body": self.left > 0}

    async def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)


@pytest.mark.parametrize(
    ("path", "key", "status", "read"),
    [
        ("/v1/fine_tuning/jobs", "stranger", 401, 0),
        ("/v1/files", "stranger", 401, 0),
        ("/v1/files", "guest", 403, 0),
        ("/v1/fine_tuning/jobs", "boss", 413, 5),
        ("/live", "stranger", 401, 0),
        ("/live", "boss", 413, 5),
        ("/v1/files", "boss", 400, 5),  # read to the end, and no upload
    ],
)
async def test_a_body_is_read_for_an_admin_and_within_its_bound(
    tmp_path: Path, path: str, key: str, status: int, read: int
) -> None:
    settings = FineTuningSettings(directory=tmp_path, admin_keys=["boss"], client_keys=["guest"])
    call = Call(path, key, LARGE)
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        await app(call.scope, call.receive, call.send)
    assert (call.status, call.read) == (status, read)


# What the gateway says of the policy: it is asked again while it is away, not when it refuses


class Replies:
    """A gateway that answers with one status after the other, and then that it serves no model."""

    def __init__(self, *statuses: int) -> None:
        self.left, self.asked, self.told = list(statuses), 0, list[str]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        status = self.left.pop(0) if self.left else 200
        return httpx.Response(status, json={"data": [{"id": "policy"}]})

    async def model_name(self, waits_s: float) -> str:
        async with httpx.AsyncClient(
            base_url="http://gateway", transport=httpx.MockTransport(self)
        ) as client:
            return await answered(PolicyWatch(client).model_name, waits_s, self.told.append)


async def test_a_gateway_that_is_away_for_a_moment_is_asked_again() -> None:
    replies = Replies(503, 502, 429)
    assert await replies.model_name(60.0) == "policy"
    assert (replies.asked, len(replies.told)) == (4, 1)


async def test_a_gateway_that_refuses_is_not_asked_again() -> None:
    replies = Replies(401, 401)
    with pytest.raises(GatewayRefused, match="HTTP 401"):
        await replies.model_name(60.0)
    assert (replies.asked, replies.told) == (1, [])


async def test_waiting_has_an_end() -> None:
    replies = Replies(*[503] * 1000)
    with pytest.raises(GatewaySilent, match="HTTP 503"):
        await replies.model_name(0.0)
