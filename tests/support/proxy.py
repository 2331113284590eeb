"""The proxy of docker-compose.yml: a real Caddy with its file, before stand-ins for gateways.

client ─▶ Caddy ─▶ 127.0.0.2, 127.0.0.3, … ─▶ a process each, with the HTTP server of the services
            └─ asks a name server of the test for the addresses, in place of Docker's
"""

import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.serving import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
CADDYFILE = ROOT / "deploy" / "proxy" / "Caddyfile"
BESIDE_PYTHON = Path(sys.executable).with_name("caddy")
CADDY = str(BESIDE_PYTHON) if BESIDE_PYTHON.exists() else shutil.which("caddy")
OPERATOR = "operators-key"
GATEWAY = f"""
import asyncio, sys
from rollout_queue.http.http_server import serve

LEFT = []

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({{"type": "lifespan.startup.complete"}})
        await receive()
        return await send({{"type": "lifespan.shutdown.complete"}})
    while scope["method"] == "POST" and (await receive()).get("more_body"):
        pass
    knows = dict(scope["headers"]).get(b"authorization") == b"Bearer {OPERATOR}"
    status = 401 if scope["path"].startswith("/admin") and not knows else 200
    if scope["path"] == "/v1/chat/completions":
        await asyncio.sleep(0.05)
    last = [(b"connection", b"close")] if LEFT else []
    await send({{"type": "http.response.start", "status": status, "headers": last}})
    await send({{"type": "http.response.body", "body": sys.argv[1].encode()}})

async def leave():
    LEFT.append(True)
    await asyncio.sleep(0.5)

serve(app, sys.argv[1], int(sys.argv[2]), 5.0, leave)
"""
"""Answers calls after 50 ms with its address, and operators' paths only to an operator. As a gateway that
leaves does, it closes each connection with its answer: the proxy writes no call into one that ends."""


class Gateway:
    """A stand-in for a gateway, in a process of its own."""

    def __init__(self, address: str, port: int) -> None:
        self.url = f"http://{address}:{port}"
        self._command = [sys.executable, "-c", GATEWAY, address, str(port)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, cwd=ROOT, stderr=subprocess.DEVNULL)
        wait_until(lambda: answers(f"{self.url}/ready"))

    def end(self, *, kill: bool) -> None:
        (self.process.kill if kill else self.process.terminate)()
        self.process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


class NameServer:
    """Answers each question for an address with all of these addresses."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                asked, peer = self._socket.recvfrom(4096)
            except OSError:  # closed
                return
            end = asked.index(b"\0", 12) + 5
            is_ipv4 = asked[end - 4 : end - 2] == b"\0\1"
            records = [
                b"\xc0\x0c\0\1\0\1\0\0\0\1\0\4" + socket.inet_aton(each)
                for each in self._addresses
                if is_ipv4
            ]
            head = asked[:2] + struct.pack("!HHHHH", 0x8180, 1, len(records), 0, 0)
            self._socket.sendto(head + asked[12:end] + b"".join(records), peer)

    def close(self) -> None:
        self._socket.close()


@contextmanager
def proxied(count: int) -> Iterator[tuple[str, list[Gateway]]]:
    """The URL of a proxy before so many gateways, and the gateways."""
    assert CADDY is not None
    port, public = free_port(), free_port()
    addresses = [f"127.0.0.{number + 2}" for number in range(count)]
    gateways, names = [Gateway(each, port) for each in addresses], NameServer(addresses)
    text = CADDYFILE.read_text(encoding="utf-8")
    for given, ours in (
        ("dynamic a gateway 8000 {\n", f"dynamic a gateway {port} {{\nresolvers 127.0.0.1:{names.port}\n"),
        ("http://:8000 {", f"http://127.0.0.1:{public} {{"),
        ("https://{$WEIR_HOST}:8443 {", f"https://localhost:{free_port()} {{"),
    ):
        assert given in text
        text = text.replace(given, ours)
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        file = Path(folder) / "Caddyfile"
        file.write_text(text, encoding="utf-8")
        words = ["run", "--config", str(file), "--adapter", "caddyfile"]
        own = {"WEIR_TLS": "internal", "XDG_DATA_HOME": folder, "XDG_CONFIG_HOME": folder, "HOME": folder}
        proxy = subprocess.Popen([CADDY, *words], env=own, stderr=log, stdout=log)
        try:
            url = f"http://127.0.0.1:{public}"
            wait_until(lambda: proxy.poll() is not None or answers(f"{url}/live"))
            yield url, gateways
        finally:
            proxy.terminate()
            proxy.wait()
            names.close()
            for each in gateways:
                each.end(kill=True)
            log.seek(0)
            print(log.read()[-4000:])
