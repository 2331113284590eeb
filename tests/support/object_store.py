"""A real S3-compatible store for tests, with one bucket, and a proxy that cuts its connections.

The store is moto's server. It keeps everything in memory, and checks signatures once `check_keys` was called.
"""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import botocore.session
import httpx
import pytest
from moto import settings
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from tests.support.authorities import ONE
from tests.support.serving import free_port

BUCKET = "policies"
KEYS = {"AWS_ACCESS_KEY_ID": "a-key", "AWS_SECRET_ACCESS_KEY": "a-secret"}
ENVIRONMENT = KEYS | {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
SESSION = botocore.session.Session()
ALLOW_ALL = {"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}


class RunningStore:
    """A store that keeps its port when it is started again, and has lost its objects then. Moto keeps objects
    for the whole process, so a store that starts empties the others, too."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client: Any = self._client("s3")
        self._answers = threading.Event()
        self._answers.set()
        self._app = DomainDispatcherApplication(create_backend_app)
        self.start()

    def start(self) -> None:
        self._server = make_server(
            "127.0.0.1", self.port, self._answer, threaded=True, request_handler=MotoRequestHandler
        )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self._reset()
        self.client.create_bucket(Bucket=BUCKET)

    def kill(self) -> None:
        """Nobody listens at its port any more."""
        self._answers.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def hang(self) -> None:
        """Accept connections, and answer nothing."""
        self._answers.clear()

    def go_on(self) -> None:
        self._answers.set()

    def keys(self, prefix: str = "") -> list[str]:
        """The keys of all objects that begin with `prefix`, in their order."""
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return [each["Key"] for each in found]

    def uploads(self) -> list[str]:
        """The keys of uploads in parts that have not ended."""
        found = self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return [each["Key"] for each in found]

    def get(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def check_keys(self) -> dict[str, str]:
        """Refuse all calls from now on, except with the keys that are returned."""
        iam = self._client("iam")
        iam.create_user(UserName="u")
        iam.put_user_policy(UserName="u", PolicyName="all", PolicyDocument=json.dumps(ALLOW_ALL))
        made = iam.create_access_key(UserName="u")["AccessKey"]
        httpx.post(f"{self.url}/moto-api/reset-auth", content=b"0", timeout=120).raise_for_status()
        return {"AWS_ACCESS_KEY_ID": made["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": made["SecretAccessKey"]}

    def close(self) -> None:
        self.kill()
        settings.INITIAL_NO_AUTH_ACTION_COUNT = float("inf")
        self.client.close()

    def _answer(self, environ: Any, start_response: Any) -> Any:
        self._answers.wait()
        return self._app(environ, start_response)

    def _reset(self) -> None:
        httpx.post(f"{self.url}/moto-api/reset", timeout=120).raise_for_status()

    def _client(self, service: str) -> Any:
        return SESSION.create_client(
            service,
            region_name="us-east-1",
            endpoint_url=self.url,
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )


class CuttingProxy:
    """Forwards connections to a store, and cuts each one after so many bytes of its answers."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.cut_after: int | None = None
        """Bytes of the answers, with their headers; None cuts nothing."""
        self.only = ""
        """Cut only answers to requests whose first line has this text."""
        self.gate: threading.Event | None = None
        """Wait for this event in place of cutting the connection, and go on then."""
        self.requests: list[str] = []
        """The first line of each request, and its range if it asks for one."""
        self.open = 0
        """How many clients are connected."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        if self.gate is not None:
            self.gate.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._listener.accept()
                self.open += 1
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as store:
            asked: list[str] = []
            threading.Thread(target=self._answer, args=(store, client, asked), daemon=True).start()
            while data := client.recv(2**16):
                lines = data.decode("latin-1").split("\r\n")
                if lines[0].endswith("HTTP/1.1"):
                    asked.append(lines[0])
                    ranges = [line for line in lines if line.lower().startswith("range:")]
                    self.requests.append(" ".join([lines[0], *ranges]))
                store.sendall(data)
        self.open -= 1

    def _answer(self, store: socket.socket, client: socket.socket, asked: list[str]) -> None:
        left = self.cut_after
        with suppress(OSError):
            while data := store.recv(2**14):
                if self.only not in asked[-1]:
                    left = None
                if left is not None and len(data) >= left:
                    client.sendall(data[:left])
                    if self.gate is None:
                        client.shutdown(socket.SHUT_RDWR)
                        return
                    self.gate.wait()
                    data, left = data[left:], None
                client.sendall(data)
                left = None if left is None else left - len(data)


@contextmanager
def object_store() -> Iterator[RunningStore]:
    store = RunningStore()
    try:
        yield store
    finally:
        store.close()


def set_environment(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """The credentials of a store, without what the machine's own environment and files say. `directory` may
    get a file of credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(directory / "credentials"))
    patch.setenv("AWS_CONFIG_FILE", str(directory / "config"))
    patch.setenv("AWS_CA_BUNDLE", ONE)  # each client reads it, also if it calls without TLS
