"""Exports are saved by a command, listed and deleted like other weights, and downloaded without a key."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.rest.tinker_api.door import MOST_DOWNLOADS
from rollout_queue.commands.command import SaveExternal
from rollout_queue.commands.result import Exported
from tests.support.gateway.running import OTHER_KEY, Backends, RunningGateway
from tests.support.gateway.scripted_trainer import ScriptedTrainer, result_of
from tests.support.gateway.tinker_loop import SamplingLoop
from tests.support.waiting import wait_until

DAY_S = 86400
WEIGHTS = bytes(range(256)) * 5000


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The files of every export."""
    place = tmp_path / "external" / "m" / "x" / "1-0"
    place.mkdir(parents=True)
    (place / "adapter_config.json").write_text("{}")
    (place / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (place / "link").symlink_to("/etc/hostname")
    (place / "folder").mkdir()
    (place.parent / "beside").write_text("of another export")
    return place


@pytest.fixture
def trainer(trainer: ScriptedTrainer, files: Path) -> ScriptedTrainer:
    """It exports these files."""
    trainer.result_of = lambda logged: (
        Exported(str(files), 1234) if isinstance(logged.command, SaveExternal) else result_of(logged)
    )
    return trainer


@pytest.fixture
def loop(gateway: RunningGateway, backends: Backends, trainer: ScriptedTrainer) -> SamplingLoop:
    return SamplingLoop(gateway, str(backends.model_path)).start()


def save(loop: SamplingLoop, number: int, name: str = "x", **more: Any) -> Any:
    return loop.poll(loop.command("save_weights_external", number, path=name, **more).json()).json()


def of(loop: SamplingLoop, method: str, what: str, key: str | None = None, run: str = "") -> Any:
    path = f"/api/v1/training_runs/{run or loop.model_id}/{what}"
    return loop.gateway.call(method, path, key=None, headers={"x-api-key": key or loop.key})


def urls(loop: SamplingLoop, name: str = "x") -> dict[str, str]:
    reply = of(loop, "GET", f"checkpoints/external_weights/{name}/external_weights_urls")
    assert reply.status_code == 200, reply.text
    found: dict[str, str] = reply.json()["urls"]
    return found


def test_an_export_has_a_path_and_is_listed(loop: SamplingLoop, trainer: ScriptedTrainer) -> None:
    saved = save(loop, 1, ttl_seconds=DAY_S)
    path = f"tinker://{loop.model_id}/external_weights/x"
    assert saved == {"path": path, "size_bytes": 1234, "type": "save_weights_external"}
    assert trainer.seen[-1].command == SaveExternal("x")
    (listed,) = of(loop, "GET", "checkpoints").json()["checkpoints"]
    assert (listed["checkpoint_id"], listed["checkpoint_type"]) == ("external_weights/x", "external")
    assert (listed["tinker_path"], listed["size_bytes"], listed["public"]) == (path, 1234, False)
    assert listed["expires_at"] > listed["time"]
    assert loop.post("weights_info", {"tinker_path": path}).json()["lora_rank"] == 8
    into = {"session_id": loop.session_id, "model_seq_id": 5, "path": path, "optimizer": True}
    assert loop.post("load_weights", into).status_code == 400
    begun = {"session_id": loop.session_id, "sampling_session_seq_id": 5, "model_path": path}
    assert loop.post("create_sampling_session", begun).status_code == 400


def test_the_files_are_downloaded_without_a_key(loop: SamplingLoop) -> None:
    save(loop, 1)
    reply = of(loop, "GET", "checkpoints/external_weights/x/external_weights_urls").json()
    assert set(reply["urls"]) == {"adapter_config.json", "adapter_model.safetensors"}
    assert reply["expires"].endswith("+00:00")
    url = reply["urls"]["adapter_model.safetensors"]
    assert url.startswith(loop.gateway.url)
    with httpx.Client(timeout=120) as anyone:
        whole = anyone.get(url)
        assert (whole.status_code, whole.content) == (200, WEIGHTS)
        assert int(whole.headers["content-length"]) == len(WEIGHTS)
        part = anyone.get(url, headers={"range": "bytes=1000000-1000009"})
        assert (part.status_code, part.content) == (206, WEIGHTS[1000000:1000010])


def changed(url: str, **parts: str) -> str:
    return urlsplit(url)._replace(**parts).geturl()


def test_only_what_is_signed_is_given_and_only_in_time(
    loop: SamplingLoop, backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(loop, 1)
    url = urls(loop)["adapter_config.json"]
    parts = urlsplit(url)
    later = f"expires={int(parts.query.partition('&')[0].partition('=')[2]) + 9}"
    folder = parts.path.rpartition("/")[0]
    refused = [
        changed(url, query=""),
        changed(url, query=later + "&" + parts.query.partition("&")[2]),
        changed(url, query=parts.query[:-1] + ("0" if parts.query[-1] != "0" else "1")),
        changed(url, path=f"{folder}/adapter_model.safetensors"),
        changed(url, path=parts.path.replace("/1/", "/2/")),
        changed(url, path=f"{folder}/link"),
    ]
    for each in refused:
        assert loop.gateway.http.get(each).status_code == 403, each
    for outside in ("..%2Fbeside", "../beside", "%2e%2e/beside", "%2Fetc%2Fhostname"):
        assert loop.gateway.http.get(changed(url, path=f"{folder}/{outside}")).status_code in (403, 404), (
            outside
        )
    with backends.gateway() as second:  # another process, which has the same secret
        host = urlsplit(second.url).netloc
        assert loop.gateway.http.get(changed(url, netloc=host)).status_code == 200
    later_s = time.time() + 2 * 3600
    monkeypatch.setattr("gateway.rest.tinker_api.management.exports.now", lambda: later_s)
    assert "expired" in loop.gateway.http.get(url).json()["error"]["message"]


def test_a_file_that_became_a_link_is_not_followed(loop: SamplingLoop, files: Path) -> None:
    save(loop, 1)
    url = urls(loop)["adapter_config.json"]
    (files / "adapter_config.json").unlink()
    assert loop.gateway.http.get(url).status_code == 404
    (files / "adapter_config.json").symlink_to("/etc/hostname")
    assert loop.gateway.http.get(url).status_code == 404


def test_the_urls_of_a_deleted_export_end(loop: SamplingLoop) -> None:
    save(loop, 1)
    url = urls(loop)["adapter_config.json"]
    assert of(loop, "DELETE", "checkpoints/external_weights/x").status_code == 204
    assert loop.gateway.http.get(url).status_code == 404
    assert of(loop, "GET", "checkpoints/external_weights/x/external_weights_urls").status_code == 404
    save(loop, 2)
    assert loop.gateway.http.get(url).status_code == 404, "the name is used again, for other files"
    assert loop.gateway.http.get(urls(loop)["adapter_config.json"]).status_code == 200


def test_other_keys_get_urls_only_of_what_is_published(loop: SamplingLoop) -> None:
    save(loop, 1)
    asked = "checkpoints/external_weights/x/external_weights_urls"
    assert of(loop, "GET", asked, key=f"tml-{OTHER_KEY}").status_code == 404
    assert of(loop, "POST", "checkpoints/external_weights/x/publish").status_code == 204
    reply = of(loop, "GET", asked, key=f"tml-{OTHER_KEY}")
    assert loop.gateway.http.get(reply.json()["urls"]["adapter_config.json"]).status_code == 200


def test_what_cannot_be_exported_or_downloaded_is_named(loop: SamplingLoop, files: Path) -> None:
    asked = loop.command("save_weights_external", 1, path="x", age_encryption_recipients=["age1x"])
    assert (asked.status_code, asked.json()["error"]["param"]) == (400, "age_encryption_recipients")
    assert loop.command("save_weights_external", 2, path="a/b").status_code == 400
    assert loop.command("save_weights_external", 3).status_code == 400
    save(loop, 4)  # the numbers of refused commands are used up
    loop.poll(loop.command("save_weights", 5, path="y").json())
    wrong = of(loop, "GET", "checkpoints/weights/y/external_weights_urls")
    assert (wrong.status_code, "is no export" in wrong.text) == (400, True)
    files.rename(files.with_name("away"))
    unreadable = of(loop, "GET", "checkpoints/external_weights/x/external_weights_urls")
    assert unreadable.status_code == 404
    assert unreadable.json()["error"]["code"] == "files_unreachable"


def test_so_many_files_are_sent_at_once(loop: SamplingLoop, files: Path) -> None:
    with (files / "large").open("wb") as large:
        large.truncate(2**28)  # more than the buffers between two processes hold
    save(loop, 1)
    url = urls(loop)["large"]
    with httpx.Client(timeout=300) as http, ExitStack() as open_ones:
        for _ in range(MOST_DOWNLOADS):
            assert open_ones.enter_context(http.stream("GET", url)).status_code == 200
        refused = http.get(url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "downloads_limit")
        assert refused.headers["retry-after"] == "5"
        open_ones.close()
        part = {"range": "bytes=0-9"}
        wait_until(lambda: http.get(url, headers=part).status_code == 206)
