"""A model named as on the Hugging Face hub is downloaded once, and whole; else a sentence says why not."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.serving import serving
from weir.errors import StackError
from weir.models import on_this_machine

FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "model.safetensors": b"\x02" + bytes(7) + b"{}",
    "run_me.py": b"raise SystemExit",
}
COMMIT = "a" * 40
NAME = Path("Qwen/Qwen3-tiny")


class Hub:
    """The routes of the hub that a download uses. `broken` files are answered with a 500."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.broken: set[str] = set()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/api/models/Qwen/Qwen3-tiny/revision/main", self.listed),
                Route(f"/api/models/Qwen/Qwen3-tiny/tree/{COMMIT}", self.tree),
                Route("/Qwen/Qwen3-tiny/resolve/{commit}/{name}", self.file, methods=["GET", "HEAD"]),
            ]
        )

    def listed(self, _: Request) -> JSONResponse:
        return JSONResponse(
            {"id": str(NAME), "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
        )

    def tree(self, _: Request) -> JSONResponse:
        entries = ((name, len(content)) for name, content in FILES.items())
        return JSONResponse(
            [{"type": "file", "oid": "b" * 40, "path": name, "size": size} for name, size in entries]
        )

    def file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if request.method == "GET":
            self.fetched.append(name)
            if name in self.broken:
                return Response(status_code=404)
        digest = hashlib.sha256(FILES[name]).hexdigest()
        return Response(FILES[name], headers={"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    with serving(hub.app()) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield hub


def test_it_is_downloaded_once_and_without_code(hub: Hub, tmp_path: Path) -> None:
    said = list[str]()
    path = on_this_machine(NAME, tmp_path, said.append)
    assert {each.name for each in path.iterdir() if each.is_file()} == {"config.json", "model.safetensors"}
    assert "downloading the model of this name from the Hugging Face hub" in said[0]
    assert said[1] == f"the model {NAME} is in {path}"
    assert on_this_machine(NAME, tmp_path, said.append) == path
    assert sorted(hub.fetched) == ["config.json", "model.safetensors"]


def test_a_download_that_failed_leaves_no_model_and_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.broken = {"model.safetensors"}
    with pytest.raises(StackError, match=r"hub: .*`hf download Qwen/Qwen3-tiny --local-dir DIR` fetches it"):
        on_this_machine(NAME, tmp_path, print)
    assert not [path for path in tmp_path.iterdir() if not path.name.endswith(".part")]
    hub.broken = set()
    assert (on_this_machine(NAME, tmp_path, print) / "model.safetensors").is_file()
    assert hub.fetched.count("config.json") == 1


@pytest.mark.parametrize("name", ["Qwen/unknown", "Qwen/Qwen3-tiny"])
def test_what_the_hub_does_not_have_or_nobody_serves_is_told(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == str(NAME):
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StackError, match=f"^{name} is not a Hugging Face directory on this machine") as told:
        on_this_machine(Path(name), tmp_path, print)
    assert len(str(told.value).splitlines()) == 1


def test_a_directory_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    NAME.mkdir(parents=True)
    for path in (NAME, Path("/nowhere/model"), Path("nowhere"), Path("models/of/mine")):
        assert on_this_machine(path, tmp_path, print) == path
