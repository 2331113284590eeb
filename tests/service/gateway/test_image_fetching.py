"""Images that a request names by an address come from listed hosts, and never from inside the network."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from gateway.errors import InvalidRequest
from gateway.language.images.fetching import ImageFetcher, PublicResolver, is_public
from tests.support.serving import serving

PNG = bytes(1000)


@dataclass
class ImageHost:
    """Serves an image, and counts its requests."""

    url: str = ""
    asked: list[str] = field(default_factory=list)

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self.answer)])

    async def answer(self, request: Request) -> Response:
        path = request.url.path
        self.asked.append(path)
        if path == "/elsewhere":
            return RedirectResponse("/image")
        return Response(PNG, 404 if path == "/missing" else 200, media_type="image/png")

    @property
    def name(self) -> str:
        return urlsplit(self.url).netloc


@pytest.fixture
def host() -> Iterator[ImageHost]:
    host = ImageHost()
    with serving(host.app()) as host.url:
        yield host


def anywhere(_: str) -> bool:
    return True


async def test_an_image_of_a_listed_host_is_fetched(host: ImageHost) -> None:
    fetcher = ImageFetcher([host.name], len(PNG), 5.0, anywhere)
    assert await fetcher.fetch(f"{host.url}/image", "where") == PNG


@pytest.mark.parametrize(
    ("path", "hosts", "most", "why"),
    [
        ("/image", [], 1000, "not fetched from this host"),
        ("/image", ["127.0.0.1"], 1000, "not fetched from this host"),
        ("/elsewhere", None, 1000, "status 307"),
        ("/missing", None, 1000, "status 404"),
        ("/image", None, 999, "at most 999 bytes"),
    ],
)
async def test_what_is_not_fetched(
    host: ImageHost, path: str, hosts: list[str] | None, most: int, why: str
) -> None:
    fetcher = ImageFetcher([host.name] if hosts is None else hosts, most, 5.0, anywhere)
    with pytest.raises(InvalidRequest, match=why) as refused:
        await fetcher.fetch(host.url + path, "messages[0]")
    assert refused.value.param == "messages[0]"
    assert "/image" not in host.asked or most < len(PNG)


@pytest.mark.parametrize(
    ("listed", "url", "allowed"),
    [
        ("192.0.2.7:443", "https://192.0.2.7/a.png", True),
        ("192.0.2.7:80", "http://192.0.2.7/a.png", True),
        ("192.0.2.7", "https://192.0.2.7:443/a.png", True),
        ("192.0.2.7", "http://192.0.2.7:80/a.png", True),
        ("192.0.2.7:443", "http://192.0.2.7/a.png", False),
        ("192.0.2.7:443", "https://192.0.2.7:444/a.png", False),
        ("192.0.2.7", "https://192.0.2.7:444/a.png", False),
        ("192.0.2.7", "http://192.0.2.7:443/a.png", False),
        ("[2606:4700::1111]:443", "https://[2606:4700::1111]/a.png", True),
        ("2606:4700::1111", "https://[2606:4700::1111]/a.png", True),
    ],
)
async def test_the_port_of_the_scheme_may_be_written_or_not(listed: str, url: str, allowed: bool) -> None:
    fetcher = ImageFetcher([listed], 1000, 5.0, lambda _: False)
    with pytest.raises(InvalidRequest) as refused:
        await fetcher.fetch(url, "where")
    assert ("not fetched from this host" in str(refused.value)) is not allowed


async def test_a_listed_host_with_a_private_address_is_not_asked(host: ImageHost) -> None:
    port = urlsplit(host.url).port
    for name in ("127.0.0.1", "localhost"):
        fetcher = ImageFetcher([f"{name}:{port}"], 1000, 5.0)
        with pytest.raises(InvalidRequest, match="public address"):
            await fetcher.fetch(f"http://{name}:{port}/image", "where")
    assert not host.asked


async def test_a_password_or_another_scheme_is_refused(host: ImageHost) -> None:
    fetcher = ImageFetcher([host.name], 1000, 5.0, anywhere)
    for url in (f"http://me:secret@{host.name}/image", f"ftp://{host.name}/image", "http://[::1/image"):
        with pytest.raises(InvalidRequest):
            await fetcher.fetch(url, "where")
    assert not host.asked


async def test_a_host_that_does_not_answer_is_told() -> None:
    fetcher = ImageFetcher(["127.0.0.1:1"], 1000, 5.0, anywhere)
    with pytest.raises(InvalidRequest, match="cannot be fetched"):
        await fetcher.fetch("http://127.0.0.1:1/image", "where")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        *[(private, False) for private in ("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "0.0.0.0")],
        *[(private, False) for private in ("169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255")],
        ("64:ff9b::8.8.8.8", True),
        *[(private, False) for private in ("64:ff9b::10.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe")],
        *[(private, False) for private in ("2002:a00:1::1", "2002:7f00:1::", "2002:808:808::1")],
        *[(private, False) for private in ("64:ff9b:1::1", "2001::1")],
        *[(private, False) for private in ("::1", "fe80::1", "fd00::1", "::ffff:10.0.0.1", "::", "ff02::1")],
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


async def test_a_name_without_a_public_address_is_not_resolved() -> None:
    with pytest.raises(OSError, match="no public address"):
        await PublicResolver(is_public).resolve("localhost")
