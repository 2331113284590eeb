"""Weights are fetched over HTTP: sizes are checked, redirects refused, and only the trainer gets the key."""

import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.rollout_server.harness import Harness, hastened, make_harness
from tests.support.rollout_server.weights import WEIGHTS
from tests.support.turned_clock import TurnedClock

TRAINER = "http://127.0.0.1:8200"
LOCATION = f"{TRAINER}/weights/1"
OTHER = "http://mirror:9000/weights"


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    harness = make_harness(tmp_path, admin_keys=["one", "two"], locations=[TRAINER, OTHER])
    harness.http.headers["authorization"] = "Bearer two"
    async with harness.started():
        yield harness


def offer(harness: Harness, url: str, directory: Path) -> None:
    for path in directory.iterdir():
        harness.network.answers[f"{url}/{path.name}"] = httpx.Response(200, content=path.read_bytes())


async def test_only_the_trainer_gets_the_admin_key(harness: Harness) -> None:
    """It gets the first one."""
    for version, location, key in ((1, LOCATION, "Bearer one"), (2, f"{OTHER}/2", None)):
        offer(harness, location, harness.policy(version))
        harness.network.requests.clear()
        assert (await harness.reload(version, location)).status_code == 200
        assert {request.headers.get("authorization") for request in harness.network.requests} == {key}
        assert (await harness.status())["version"] == version


async def test_a_redirect_is_not_followed(harness: Harness) -> None:
    elsewhere = {"location": f"{OTHER}/1/manifest.json"}
    harness.network.answers[f"{LOCATION}/manifest.json"] = httpx.Response(302, headers=elsewhere)
    answer = await harness.reload(1, LOCATION)
    assert (answer.status_code, "HTTP 302" in answer.text) == (503, True)
    assert len(harness.network.requests) == 1


async def test_only_a_source_that_lacks_the_file_is_definite(harness: Harness) -> None:
    for status, sources in ((422, (404, 410, 416)), (503, (401, 403, 408, 429, 500))):
        for source in sources:
            harness.network.answers[f"{LOCATION}/manifest.json"] = httpx.Response(source)
            answer = await harness.reload(1, LOCATION)
            assert (answer.status_code, f"HTTP {source}" in answer.text) == (status, True)


async def test_files_are_asked_for_as_they_are_and_a_damaged_encoding_may_pass(harness: Harness) -> None:
    async def damaged(request: httpx.Request) -> httpx.Response:
        async def content() -> AsyncIterator[bytes]:
            yield b"not gzip"

        return httpx.Response(200, headers={"content-encoding": "gzip"}, content=content())

    harness.network.source = damaged
    answer = await harness.reload(1, LOCATION)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "storage_unavailable")
    assert harness.network.requests[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(("spoiled", "status"), [(1, 200), (2, 422)])
async def test_a_file_that_arrives_broken_is_fetched_once_more(
    harness: Harness, spoiled: int, status: int
) -> None:
    directory = harness.policy(1)
    offer(harness, LOCATION, directory)

    async def spoiling(request: httpx.Request) -> httpx.Response:
        name = str(request.url).rsplit("/", 1)[1]
        raw = (directory / name).read_bytes()
        broken = name == WEIGHTS and len(weights_urls(harness)) <= spoiled
        return httpx.Response(200, content=raw[:-1] + bytes([raw[-1] ^ 1]) if broken else raw)

    harness.network.source = spoiling
    assert (await harness.reload(1, LOCATION)).status_code == status
    assert len(weights_urls(harness)) == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda raw: httpx.Response(200, content=raw[:-1]), "the manifest says"),
        (lambda raw: httpx.Response(200, content=raw + b"x"), "is longer than"),
        (lambda _: httpx.Response(404), "HTTP 404"),
    ],
    ids=["short", "long", "missing"],
)
async def test_a_download_of_another_length_or_a_missing_file_is_422(
    harness: Harness, change: Callable[[bytes], httpx.Response], reason: str
) -> None:
    directory = harness.policy(1)
    offer(harness, LOCATION, directory)
    harness.network.answers[f"{LOCATION}/{WEIGHTS}"] = change((directory / WEIGHTS).read_bytes())
    answer = await harness.reload(1, LOCATION)
    assert (answer.status_code, reason in answer.text) == (422, True)
    assert (await harness.status())["version"] == 0


async def test_a_trainer_that_is_down_is_503_and_the_old_version_serves(harness: Harness) -> None:
    answer = await harness.reload(1, LOCATION)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "storage_unavailable")
    assert (await harness.status())["state"] == "ready"


async def test_all_but_the_probes_need_an_admin_key(harness: Harness) -> None:
    harness.http.headers.pop("authorization")
    for path in ("/live", "/ready", "/metrics"):
        assert (await harness.http.get(path)).status_code == 200
    assert (await harness.http.get("/status")).status_code == 401
    for path in ("/reload", "/drain", "/resume"):
        assert (await harness.http.post(path, json={})).status_code == 401


async def test_with_a_key_of_their_own_rollout_servers_present_it_and_take_it(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"admin_keys": ["admin"], "rollout_server_key": "server"}
    harness = make_harness(tmp_path, locations=[TRAINER], gateway_url="http://gateway", **keys)
    async with harness.started():
        for key, status in (("server", 200), ("admin", 200), ("other", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await harness.http.get("/status", headers=headers)).status_code == status
        harness.http.headers["authorization"] = "Bearer server"
        offer(harness, LOCATION, harness.policy(1))
        assert (await harness.reload(1, LOCATION)).status_code == 200
        sent = {(r.url.host, r.headers.get("authorization")) for r in harness.network.requests}
        assert sent == {("gateway", "Bearer server"), ("127.0.0.1", "Bearer server")}


PEER = "http://r7:8100"


def offer_at_peer(harness: Harness, version: int, directory: Path) -> str:
    """Let another server have the files; return the SHA-256 of the manifest."""
    digest = hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()
    offer(harness, f"{PEER}/weights/{version}/{digest}", directory)
    return digest


def weights_urls(harness: Harness) -> list[str]:
    """Where the weights were asked for."""
    urls = [str(request.url) for request in harness.network.requests]
    return [url.removesuffix(f"/{WEIGHTS}") for url in urls if url.endswith(".safetensors")]


async def test_files_come_from_the_peer_and_the_manifest_from_the_location(harness: Harness) -> None:
    directory = harness.policy(1)
    offer(harness, f"{OTHER}/1", directory)
    digest = offer_at_peer(harness, 1, directory)
    answer = await harness.reload(1, f"{OTHER}/1", manifest_sha256=digest, peer=PEER)
    assert answer.status_code == 200, answer.text
    assert weights_urls(harness) == [f"{PEER}/weights/1/{digest}"]
    keys = {str(r.url): r.headers.get("authorization") for r in harness.network.requests}
    assert keys[f"{OTHER}/1/manifest.json"] is None
    assert keys[f"{PEER}/weights/1/{digest}/{WEIGHTS}"] == "Bearer one"


@pytest.mark.parametrize("fault", ["gone", "corrupt", "short", "failing"])
async def test_a_peer_without_the_right_files_is_replaced_by_the_location(
    turned: TurnedClock, harness: Harness, fault: str
) -> None:
    directory = harness.policy(1)
    offer(harness, LOCATION, directory)
    digest = offer_at_peer(harness, 1, directory)
    raw = (directory / WEIGHTS).read_bytes()
    harness.network.answers[f"{PEER}/weights/1/{digest}/{WEIGHTS}"] = {
        "gone": httpx.Response(404),
        "corrupt": httpx.Response(200, content=raw[:-1] + bytes([raw[-1] ^ 1])),
        "short": httpx.Response(200, content=raw[:-1]),
        "failing": httpx.Response(500),
    }[fault]
    answer = await hastened(turned, harness.reload(1, LOCATION, peer=PEER))
    assert answer.status_code == 200, answer.text
    assert weights_urls(harness)[-1] == LOCATION
    assert harness.kept_weights(1) == raw


async def test_a_server_offers_the_files_of_versions_that_it_has_verified(harness: Harness) -> None:
    directory = harness.policy(1)
    offer(harness, LOCATION, directory)
    digest = hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()
    path = f"/weights/1/{digest}"
    assert (await harness.http.get(f"{path}/{WEIGHTS}")).status_code == 404
    await harness.reload(1, LOCATION, prepare=True)
    whole = await harness.http.get(f"{path}/{WEIGHTS}")
    assert whole.content == (directory / WEIGHTS).read_bytes()
    part = await harness.http.get(f"{path}/{WEIGHTS}", headers={"range": "bytes=100-"})
    assert (part.status_code, part.content) == (206, whole.content[100:])
    for wrong in (f"{path}/absent", f"{path}/..%2f..%2fmodel", f"/weights/1/{64 * '0'}/config.json"):
        assert (await harness.http.get(wrong)).status_code == 404
    harness.http.headers.pop("authorization")
    assert (await harness.http.get(f"{path}/{WEIGHTS}")).status_code == 401


class BreakingSource:
    """Serves a directory, and breaks each connection after `bytes_each` bytes of a file."""

    def __init__(self, url: str, directory: Path, bytes_each: int, *, ranges: bool) -> None:
        self.url, self.directory = url, directory
        self.bytes_each, self.ranges = bytes_each, ranges
        self.asked: list[str | None] = []

    async def handle(self, request: httpx.Request) -> httpx.Response:
        name = str(request.url).removeprefix(f"{self.url}/")
        content = (self.directory / name).read_bytes()
        if not name.endswith(".safetensors"):
            return httpx.Response(200, content=content)
        asked = request.headers.get("range")
        self.asked.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.ranges else 0
        end = start + self.bytes_each if self.ranges else self.bytes_each * len(self.asked)

        async def broken() -> AsyncIterator[bytes]:
            yield content[start:end]
            if end < len(content):
                raise httpx.ReadError("the connection broke")

        return httpx.Response(206 if start else 200, content=broken())


@pytest.mark.parametrize("ranges", [True, False])
async def test_a_download_that_breaks_goes_on_where_it_broke(harness: Harness, ranges: bool) -> None:
    directory = harness.policy(1)
    size = (directory / WEIGHTS).stat().st_size
    source = BreakingSource(LOCATION, directory, size // 3, ranges=ranges)
    harness.network.source = source.handle
    assert (await harness.reload(1, source.url)).status_code == 200
    third = size // 3
    assert source.asked == [None, *(f"bytes={n * third}-" for n in range(1, -(-size // third)))]
    assert harness.kept_weights(1) == (directory / WEIGHTS).read_bytes()


async def test_a_download_that_brings_nothing_more_fails(turned: TurnedClock, harness: Harness) -> None:
    source = BreakingSource(LOCATION, harness.policy(1), 0, ranges=True)
    harness.network.source = source.handle
    answer = await hastened(turned, harness.reload(1, source.url))
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "storage_unavailable")
    assert len(source.asked) <= 6
