"""Bodies: a stranger's is not read, and only an upload may be large."""

from pathlib import Path
from typing import Any

import pytest

from fine_tuning.app import create_app
from fine_tuning.settings import FineTuningSettings

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
        ("/live", "stranger", 413, 5),
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
