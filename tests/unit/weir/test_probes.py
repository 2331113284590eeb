"""The probes of `weir up` say that a service is not ready, whatever it answers, and raise nothing."""

import socket
from threading import Thread

import pytest

from weir.stack.service_process import http_ready


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"HTTP/1.1 503 no\r\ncontent-length: 9\r\n\r\n", id="a body that does not come"),
        pytest.param(b"nonsense\r\n\r\n", id="no HTTP"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_an_answer_that_stops_is_no_answer_yet(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.stack.service_process.PROBE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        lines = []

        def serve() -> None:
            line, _ = server.accept()
            line.sendall(said)
            lines.append(line)

        serving = Thread(target=serve)
        serving.start()
        assert http_ready(f"http://127.0.0.1:{server.getsockname()[1]}")() == "it does not answer yet"
        serving.join()
        lines[0].close()
