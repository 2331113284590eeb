"""Rollout servers with one id, URL or disk: none takes another's place or files."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rollout_queue.redis import key_names
from rollout_server.weights.weights_store import DirectoryTaken
from tests.support.gateway.running import Backends, RunningGateway, emptied
from tests.support.rollout_server.in_process import ServerThread, server_thread
from tests.support.rollout_server.weights import (
    float32_tensors,
    publish,
    published_copy,
    write_model,
    write_safetensors,
)
from tests.support.serving import free_port
from tests.support.waiting import wait_until

Start = Callable[..., ServerThread]


@pytest.fixture(scope="module")
def fleet(own_backends: Backends) -> Iterator[RunningGateway]:
    own_backends.clear(None)
    with own_backends.gateway(engines=[]) as gateway:
        yield gateway


@pytest.fixture
def start(fleet: RunningGateway, tmp_path: Path) -> Iterator[Start]:
    """Starts rollout servers of the gateway `fleet`; each stops when the test ends."""
    emptied(fleet.redis)
    wait_until(lambda: servers(fleet) == {})
    model = write_model(tmp_path / "model")
    with ExitStack() as started:

        def start(**settings: Any) -> ServerThread:
            given = {
                "port": free_port(),
                "engine_port": free_port(),
                "model_path": model,
                "gateway_url": fleet.url,
                "register_every_s": 0.1,
                "weights_dir": tmp_path / "weights",
                "policies_dir": tmp_path / "policies",
            } | settings
            return started.enter_context(server_thread(tmp_path, given))

        yield start


def servers(fleet: RunningGateway) -> dict[str, str]:
    """The URL of each server that the gateway lists, by id."""
    return {server["id"]: server["url"] for server in fleet.admin("GET", "/rollout_servers").json()["data"]}


def ready(fleet: RunningGateway) -> set[str]:
    """The URLs of the servers that the gateway finds ready."""
    page = fleet.admin("GET", "/rollout_servers").json()
    return {server["url"] for server in page["data"] if server["state"] == "ready"}


def push(fleet: RunningGateway, directory: Path, version: int) -> Any:
    policy = directory / "policies" / f"v{version}"
    published_copy(directory / "model", policy, version)
    write_safetensors(policy / "model.safetensors", float32_tensors(1.0 + version))
    publish(policy, version)
    reply = fleet.admin("POST", "/policies", {"version": version, "location": policy.as_uri()})
    assert reply.status_code == 200, reply.text
    return reply.json()["results"]


def test_two_servers_with_the_defaults_are_two_and_keep_their_own_files(
    fleet: RunningGateway, start: Start, tmp_path: Path
) -> None:
    one, two = start(), start()
    wait_until(lambda: ready(fleet) == {one.url, two.url})
    for version in (1, 2, 3):
        assert len(push(fleet, tmp_path, version)) == 2
    for name in ("server-0", "server-1"):
        kept = sorted(path.name[:9] for path in (tmp_path / "weights" / name).glob("v*"))
        assert kept == ["v00000002", "v00000003"]


@pytest.mark.long
def test_a_server_takes_the_directory_that_a_former_one_has_left(start: Start, tmp_path: Path) -> None:
    start().kill()
    third = start()
    wait_until(third.is_ready)
    assert [path.name for path in (tmp_path / "weights").glob("*.lock")] == ["server-0.lock"]


def test_a_second_server_with_one_id_is_refused_until_the_first_has_ended(
    fleet: RunningGateway, start: Start, tmp_path: Path
) -> None:
    one = start(id="same")
    wait_until(lambda: servers(fleet) == {"same": one.url})
    two = start(id="same", weights_dir=tmp_path / "elsewhere")
    said = wait_until(lambda: refusal(two))
    assert f"two rollout servers have the id same: the other one is same at {one.url}" in said
    assert "rollout_server.id" in said
    assert said in two.log.read_text()
    assert servers(fleet) == {"same": one.url}
    one.kill()
    wait_until(lambda: ready(fleet) == {two.url})
    wait_until(two.is_ready)


@pytest.mark.long
def test_a_second_server_at_one_url_is_refused(fleet: RunningGateway, start: Start) -> None:
    one = start()
    wait_until(lambda: ready(fleet) == {one.url})
    two = start(public_url=one.url)
    assert f"two rollout servers have the URL {one.url}" in wait_until(lambda: refusal(two))
    assert list(servers(fleet).values()) == [one.url]


def test_a_server_that_was_replaced_while_it_stood_still_is_refused_when_it_goes_on(
    fleet: RunningGateway, start: Start, tmp_path: Path
) -> None:
    one = start(id="same")
    wait_until(lambda: ready(fleet) == {one.url})
    one.suspend()
    two = start(id="same", weights_dir=tmp_path / "elsewhere")
    wait_until(lambda: ready(fleet) == {two.url})
    one.resume()
    assert "two rollout servers have the id same" in wait_until(lambda: refusal(one))
    assert servers(fleet) == {"same": two.url}


def test_a_server_that_starts_again_under_its_id_joins_at_once(fleet: RunningGateway, start: Start) -> None:
    ports = {"port": free_port(), "engine_port": free_port()}
    first = start(id="same", **ports)
    wait_until(lambda: ready(fleet) == {first.url})
    first.kill()
    wait_until(lambda: not ready(fleet))
    again = start(id="same", **ports)
    wait_until(lambda: ready(fleet) == {again.url})
    assert "refuses" not in again.log.read_text()


def test_two_servers_with_one_id_and_one_disk_do_not_both_start(start: Start, tmp_path: Path) -> None:
    one = start(id="same")
    wait_until(one.is_ready)
    with pytest.raises(
        DirectoryTaken, match=f"another rollout server uses the weights in {tmp_path}/weights/same"
    ):
        start(id="same")


def test_a_dead_server_is_forgotten_after_the_time_that_it_named(fleet: RunningGateway, start: Start) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for name, limit_s in (("passing", 0.1), ("lasting", None)):
        body = {"id": name, "url": url, "engine_url": url, "forget_after_s": limit_s}
        assert fleet.admin("POST", "/rollout_servers", body).status_code == 200
    wait_until(lambda: set(servers(fleet)) == {"lasting"})
    assert fleet.redis.hkeys(key_names.SERVERS) == [b"lasting"]


def refusal(server: ServerThread) -> str:
    said = server.why_unready()
    return said.removeprefix("the gateway refuses this server: ") if "refuses" in said else ""
