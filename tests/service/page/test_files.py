"""The page's files: what the browser may do with them, how long it keeps them, and where no path leads."""

import json
import re
from pathlib import Path

import pytest

from gateway.page.page_parts import page_files
from tests.support.gateway.running import RunningGateway
from tests.support.page.client import raw, status_of
from tests.support.page.vendored import FOLDER, digest_of, vendored

ASSETS = Path(__file__).parents[3] / "gateway/page/assets"
SCRIPTS = sorted(path for path in ASSETS.rglob("*.js") if "vendor" not in path.parts)
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write|\beval\(|new Function"
    r"|DOMParser|srcdoc|javascript:"
)


def test_the_page_may_use_its_own_files_only(gateway: RunningGateway) -> None:
    reply = gateway.get("/", key=None)
    assert reply.status_code == 200
    policy = reply.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"} < set(policy)
    assert {"base-uri 'none'", "frame-ancestors 'none'", "form-action 'self'"} < set(policy)
    assert not [each for each in policy if "unsafe" in each or "http" in each or "*" in each]
    for name, value in (
        ("cache-control", "no-store"),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
    ):
        assert reply.headers[name] == value


def test_the_page_has_no_script_and_no_style_in_its_text() -> None:
    html = (ASSETS / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r"<script(?![^>]*\bsrc=)[^>]*>|<style|\bstyle=|\bon[a-z]+=", html)
    assert not re.findall(r"https?://", html)


def test_no_script_makes_markup_or_code_from_text() -> None:
    assert len(SCRIPTS) > 10
    found = {path.name: MARKUP.findall(path.read_text(encoding="utf-8")) for path in SCRIPTS}
    comments = {"dom.js": ["innerHTML"]}  # it says that nothing uses it
    assert {name: each for name, each in found.items() if each} == comments


def test_the_pages_own_scripts_are_short() -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in SCRIPTS}
    assert not {name: lines for name, lines in lengths.items() if lines > 300}


def test_a_file_of_this_version_is_kept_for_ever(gateway: RunningGateway) -> None:
    names = re.findall(r'"(/page/assets/[^"]+)"', gateway.get("/", key=None).text)
    assert len(names) > 10
    for name in names:
        reply = gateway.get(name, key=None)
        assert reply.status_code == 200, name
        assert reply.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert reply.headers["x-content-type-options"] == "nosniff"
        again = gateway.get(name, key=None, headers={"if-none-match": reply.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        plain = gateway.get(name, key=None, headers={"accept-encoding": "identity"})
        assert plain.content == reply.content
        assert "content-encoding" not in plain.headers
    assert gateway.call("HEAD", names[0], key=None).headers["content-length"]


def test_a_file_of_another_version_is_asked_for_each_time(gateway: RunningGateway) -> None:
    reply = gateway.get("/page/assets/0123456789abcdef/app.js", key=None)
    assert (reply.status_code, reply.headers["cache-control"]) == (200, "no-cache")


@pytest.mark.parametrize(
    "path",
    [
        "../files.py",
        "..%2ffiles.py",
        "%2e%2e/files.py",
        "..%5cfiles.py",
        "views/../../files.py",
        "....//files.py",
        "%2fetc%2fpasswd",
        "//etc/passwd",
        "app.js%00.css",
        "index.html",
        "vendor/vendor.json",
        "vendor/LICENSE.htm",
        "views/",
        "",
        "%ff",
    ],
)
def test_no_path_leads_to_another_file(gateway: RunningGateway, path: str) -> None:
    whole = f"/page/assets/{page_files().version}/{path}"
    reply = raw(gateway.url, f"GET {whole} HTTP/1.1\r\nhost: HOST\r\nconnection: close")
    told = json.loads(reply.split(b"\r\n\r\n", 1)[1])["error"]["type"]
    assert (status_of(reply), told) in ((404, "not_found_error"), (400, "invalid_request_error"))


def test_the_libraries_are_those_of_vendor_json() -> None:
    for each in vendored():
        assert digest_of(FOLDER / each["file"]) == each["sha256"], each["file"]
        assert (FOLDER / each["licence_file"]).stat().st_size > 500
        assert each["version"]
    listed = {each["file"] for each in vendored()} | {each["licence_file"] for each in vendored()}
    assert {path.name for path in FOLDER.iterdir()} == listed | {"vendor.json"}
