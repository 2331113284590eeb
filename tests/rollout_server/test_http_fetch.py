"""Weights over HTTP, as the trainer serves them: bounded, without redirects, our key to the trainer alone."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.rollout_server.conftest import House, make_house

TRAINER = "http://127.0.0.1:8200"
OTHER = "http://mirror:9000/weights"


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = make_house(tmp_path, admin_keys=["one", "two"], locations=[TRAINER, OTHER])
    house.http.headers["authorization"] = "Bearer two"
    await house.server.open()
    await house.until_ready()
    yield house
    await house.http.aclose()
    await house.server.close()


def offer(house: House, url: str, directory: Path) -> None:
    for path in directory.iterdir():
        house.outside.answers[f"{url}/{path.name}"] = httpx.Response(200, content=path.read_bytes())


async def test_a_version_is_fetched_from_the_trainer_with_the_first_admin_key(house: House) -> None:
    offer(house, f"{TRAINER}/weights/1", house.policy(1))
    assert (await house.reload(1, f"{TRAINER}/weights/1")).status_code == 200
    assert {request.headers["authorization"] for request in house.outside.requests} == {"Bearer one"}
    assert (await house.status())["version"] == 1


async def test_nobody_but_the_trainer_sees_our_key(house: House) -> None:
    offer(house, f"{OTHER}/1", house.policy(1))
    assert (await house.reload(1, f"{OTHER}/1")).status_code == 200
    assert all("authorization" not in request.headers for request in house.outside.requests)


async def test_a_redirect_is_not_followed(house: House) -> None:
    elsewhere = {"location": f"{OTHER}/1/manifest.json"}
    house.outside.answers[f"{TRAINER}/weights/1/manifest.json"] = httpx.Response(302, headers=elsewhere)
    answer = await house.reload(1, f"{TRAINER}/weights/1")
    assert (answer.status_code, "HTTP 302" in answer.text) == (422, True)
    assert len(house.outside.requests) == 1


async def test_a_file_that_is_not_there_is_422(house: House) -> None:
    offer(house, f"{TRAINER}/weights/1", house.policy(1))
    house.outside.answers[f"{TRAINER}/weights/1/model.safetensors"] = httpx.Response(404)
    answer = await house.reload(1, f"{TRAINER}/weights/1")
    assert (answer.status_code, "HTTP 404" in answer.text) == (422, True)


@pytest.mark.parametrize(("change", "reason"), [(b"", "the manifest says"), (b"x", "is longer than")])
async def test_a_download_of_another_length_is_422(house: House, change: bytes, reason: str) -> None:
    directory = house.policy(1)
    offer(house, f"{TRAINER}/weights/1", directory)
    raw = (directory / "model.safetensors").read_bytes()
    wrong = raw + change if change else raw[:-1]
    house.outside.answers[f"{TRAINER}/weights/1/model.safetensors"] = httpx.Response(200, content=wrong)
    answer = await house.reload(1, f"{TRAINER}/weights/1")
    assert (answer.status_code, reason in answer.text) == (422, True)
    assert (await house.status())["version"] == 0


async def test_a_trainer_that_is_down_is_503_and_the_old_version_serves(house: House) -> None:
    answer = await house.reload(1, f"{TRAINER}/weights/1")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "storage_unavailable")
    assert (await house.status())["state"] == "ready"


async def test_all_but_the_probes_need_an_admin_key(house: House) -> None:
    house.http.headers.pop("authorization")
    for path in ("/live", "/ready", "/metrics"):
        assert (await house.http.get(path)).status_code == 200
    assert (await house.http.get("/status")).status_code == 401
    for path in ("/reload", "/drain", "/resume"):
        assert (await house.http.post(path, json={})).status_code == 401
