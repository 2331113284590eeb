"""`python -m gateway` says at the start when everybody may call it, and does not offer that to a network."""

import socket
import sys
from pathlib import Path

import httpx
import pytest

import gateway.__main__
from gateway.settings import GatewaySettings
from rollout_queue import starting
from rollout_queue.http.http_server import KEEP_ALIVE_S
from tests.support.service_log import log_of


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[GatewaySettings]:
    """The settings with which the program came to serve."""
    found = list[GatewaySettings]()
    monkeypatch.setattr(sys, "argv", ["gateway"])
    monkeypatch.setattr(gateway.__main__, "serve_gateway", found.append)
    monkeypatch.setattr(starting, "begin_log", lambda *_: None)  # `log_of` has begun it
    for name in ("WEIR_CLIENT_KEYS", "WEIR_ADMIN_KEYS", "WEIR_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WEIR_MODEL_PATH", str(tmp_path))
    return found


def test_without_keys_it_warns(served: list[GatewaySettings], tmp_path: Path) -> None:
    with log_of(GatewaySettings(model_path=tmp_path)) as written:
        gateway.__main__.main()
    assert len(served) == 1
    assert "no keys are set" in written.getvalue()


def test_without_keys_it_does_not_listen_to_the_network(
    served: list[GatewaySettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_GATEWAY__HOST", "0.0.0.0")
    with pytest.raises(SystemExit, match=r"refusing to listen on 0\.0\.0\.0 without keys") as end:
        gateway.__main__.main()
    assert isinstance(end.value.code, str), "Python prints it, and exits with status 1"
    assert not served


def test_several_workers_refuse_a_taken_address(tmp_path: Path) -> None:
    """Also one that workers of another gateway share."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = GatewaySettings(model_path=tmp_path, port=taken.getsockname()[1], workers=2)
        with pytest.raises(SystemExit, match="cannot listen on"):
            gateway.__main__.run_gateways(settings)


def test_clients_close_idle_connections_first() -> None:
    """Otherwise a client might send a request on a connection that the gateway is just closing."""
    expiry_s = httpx.Limits().keepalive_expiry
    assert expiry_s is not None
    assert expiry_s < KEEP_ALIVE_S
