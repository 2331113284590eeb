"""Weights that a client has saved: listed, kept for a time, deleted, published, copied and downloaded."""

import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from gateway.tinker.door import MOST_DOWNLOADS
from gateway.tinker.paths import KeptTerms, encode_record
from gateway.tinker.weights import KeptWeightsStore
from rollout_queue.redis import key_names
from rollout_queue.redis.command_log import CommandSubmissions
from rollout_queue.trainer_commands import (
    CommandFailed,
    Exported,
    LoadWeights,
    SaveExternal,
    SaveWeights,
    request_id,
)
from tests.support.gateway.running import OTHER_KEY, Backends, RunningGateway
from tests.support.gateway.scripted_trainer import ScriptedTrainer, result_of
from tests.support.gateway.tinker_loop import SamplingLoop
from tests.support.redis_clients import async_redis_at
from tests.support.waiting import wait_until

DAY_S = 86400
TO_TRAIN, TO_SAMPLE = "weights/one", "sampler_weights/two"


@pytest.fixture
def loop(gateway: RunningGateway, backends: Backends, trainer: ScriptedTrainer) -> SamplingLoop:
    loop = SamplingLoop(gateway, str(backends.model_path)).start()
    loop.done("save_weights", 1, path="one", ttl_seconds=DAY_S, user_metadata={"why": "test"})
    loop.done("save_weights_for_sampler", 2, path="two")
    loop.done("save_weights", 3, path="three")
    loop.done("save_weights_for_sampler", 4, sampling_session_seq_id=9)
    return loop


def path_of(loop: SamplingLoop, name: str) -> str:
    return f"tinker://{loop.model_id}/{name}"


def send(loop: SamplingLoop, method: str, what: str, body: Any = None) -> Any:
    return loop.call(method, f"training_runs/{loop.model_id}/checkpoints/{what}", body)


def listed(loop: SamplingLoop, model_id: str = "") -> dict[str, Any]:
    """The checkpoints of a model by name, the newest first."""
    found = loop.get(f"training_runs/{model_id or loop.model_id}/checkpoints").json()["checkpoints"]
    return {each["checkpoint_id"]: each for each in found}


def info(loop: SamplingLoop, path: str) -> int:
    return int(loop.post("weights_info", {"tinker_path": path}).status_code)


def load(loop: SamplingLoop, path: str, number: int = 5) -> int:
    into = {"session_id": loop.session_id, "model_seq_id": number, "path": path, "optimizer": True}
    return int(loop.post("load_weights", into).status_code)


def sampler_of(loop: SamplingLoop, path: str, number: int) -> Any:
    body = {"session_id": loop.session_id, "sampling_session_seq_id": number, "model_path": path}
    return loop.post("create_sampling_session", body)


def other_loop(loop: SamplingLoop) -> SamplingLoop:
    """Another key's client, with a session of its own."""
    return SamplingLoop(loop.gateway, loop.base_model, f"tml-{OTHER_KEY}").start()


# Lists


def test_checkpoints_are_listed_the_newest_first(loop: SamplingLoop) -> None:
    found = listed(loop)
    assert [(name, each["checkpoint_type"]) for name, each in found.items()] == [
        ("weights/three", "training"),
        (TO_SAMPLE, "sampler"),
        (TO_TRAIN, "training"),
    ]
    oldest = found[TO_TRAIN]
    assert (oldest["tinker_path"], oldest["size_bytes"]) == (path_of(loop, TO_TRAIN), 1234)
    assert (oldest["user_metadata"], oldest["expires_at"] > oldest["time"]) == ({"why": "test"}, True)
    assert found["weights/three"]["expires_at"] is None
    everything = loop.get("checkpoints", limit=2, offset=1).json()
    assert [each["checkpoint_id"] for each in everything["checkpoints"]] == [TO_SAMPLE, TO_TRAIN]
    assert everything["cursor"] == {"limit": 2, "offset": 1, "total_count": 3}


def test_training_runs_and_sessions_are_listed_for_their_key(loop: SamplingLoop) -> None:
    loop.create(seq=1)
    page = loop.get("training_runs", limit=1).json()
    assert page["cursor"] == {"limit": 1, "offset": 0, "total_count": 2}
    assert [each["training_run_id"] for each in page["training_runs"]] == [f"{loop.session_id}:train:1"]
    run = loop.get(f"training_runs/{loop.model_id}", access_scope="owned").json()
    assert (run["base_model"], run["is_lora"], run["lora_rank"]) == (loop.base_model, True, 8)
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/three"
    assert run["last_sampler_checkpoint"]["checkpoint_id"] == TO_SAMPLE
    assert loop.get("sessions").json() == {"sessions": [loop.session_id]}
    session = loop.get(f"sessions/{loop.session_id}").json()
    assert session["training_run_ids"] == [loop.model_id, f"{loop.session_id}:train:1"]
    assert session["sampler_ids"] == [f"{loop.session_id}:sample:0", f"{loop.session_id}:sample:9"]
    assert loop.get("training_runs", project_id="x").status_code == 400
    assert loop.get("training_runs", limit=0).status_code == 400

    other = loop.of_another_key()
    for what in ("training_runs", "checkpoints", "sessions"):
        assert other.get(what).json()[what] == []
    of_ours = f"training_runs/{loop.model_id}"
    for path in (of_ours, f"{of_ours}/checkpoints", f"sessions/{loop.session_id}"):
        assert other.get(path).status_code == 404, path


# Ends


def test_weights_that_have_expired_are_gone(loop: SamplingLoop) -> None:
    path = path_of(loop, TO_TRAIN)
    assert info(loop, path) == 200
    terms = msgspec.json.encode({"ttl_s": 0})
    loop.gateway.redis.hset(key_names.kept_terms(loop.model_id), f"{TO_TRAIN}#1", terms)
    assert (info(loop, path), load(loop, path)) == (404, 404)
    assert TO_TRAIN not in listed(loop)


def test_deleted_weights_cannot_be_listed_loaded_or_sampled(
    loop: SamplingLoop, trainer: ScriptedTrainer
) -> None:
    saved = {each.number: each.position for each in trainer.seen}
    session = sampler_of(loop, path_of(loop, TO_SAMPLE), 20).json()["sampling_session_id"]
    for name in (TO_TRAIN, TO_SAMPLE):
        assert send(loop.of_another_key(), "DELETE", name).status_code == 404
        assert name in listed(loop), "only its owner deletes it"
        assert send(loop, "DELETE", name).status_code == 204
        again = send(loop, "DELETE", name)
        assert again.status_code == 404
        assert again.json()["error"]["message"] == f"there are no weights {path_of(loop, name)}"
    assert list(listed(loop)) == ["weights/three"]
    assert info(loop, path_of(loop, TO_TRAIN)) == 404
    assert sampler_of(loop, path_of(loop, TO_SAMPLE), 21).status_code == 404
    refused = loop.ask(0, [1, 2], sampling_session_id=session)
    assert refused.status_code == 404, "a sampling session that has begun ends with it"
    for unknown in ("weights/none", "sampler_weights/~9", "elsewhere/one"):
        assert send(loop, "DELETE", unknown).status_code == 404
    dropped = trainer.reader.dropped()
    (drop,) = dropped.weights[loop.model_id, TO_TRAIN]
    assert (drop.saved, drop.deleted) == (saved[1], max(saved.values()))
    assert dropped.adapters == {(loop.model_id.replace(":", "."), 2): saved[2]}


def test_a_time_to_live_is_changed_and_taken_back(loop: SamplingLoop, trainer: ScriptedTrainer) -> None:
    assert send(loop, "PUT", "weights/three/ttl", {"ttl_seconds": 2 * DAY_S}).status_code == 204
    found = listed(loop)
    assert found["weights/three"]["expires_at"] > found[TO_TRAIN]["expires_at"]
    assert send(loop, "PUT", f"{TO_TRAIN}/ttl", {"ttl_seconds": None}).status_code == 204
    assert listed(loop)[TO_TRAIN]["expires_at"] is None
    assert listed(loop)[TO_TRAIN]["user_metadata"] == {"why": "test"}
    timed: Any = loop.gateway.redis.zrange(key_names.KEPT_EXPIRES, 0, -1)
    assert timed == [f"{loop.model_id}|weights/three|3".encode()]
    for seconds in (3599, 315_360_001):
        assert send(loop, "PUT", f"{TO_TRAIN}/ttl", {"ttl_seconds": seconds}).status_code == 400
    assert send(loop, "PUT", "weights/none/ttl", {"ttl_seconds": DAY_S}).status_code == 404
    assert send(loop.of_another_key(), "PUT", f"{TO_TRAIN}/ttl", {"ttl_seconds": DAY_S}).status_code == 404
    assert trainer.reader.dropped().adapters == {}
    assert loop.finish() == 200
    nameless = [(loop.model_id.replace(":", "."), 4)]
    assert list(trainer.reader.dropped().adapters) == nameless, "they end with their client"
    assert set(listed(loop)) == {TO_TRAIN, "weights/three", TO_SAMPLE}


async def test_weights_whose_time_is_over_are_deleted(
    loop: SamplingLoop, backends: Backends, trainer: ScriptedTrainer
) -> None:
    redis = async_redis_at(backends.redis_url)
    store = KeptWeightsStore(redis, CommandSubmissions(redis, lambda: 1000))
    await store.end_expired()
    assert TO_TRAIN in listed(loop), "its time is not over"
    for name, number in ((TO_TRAIN, 1), ("weights/three", 3)):
        send(loop, "PUT", f"{name}/ttl", {"ttl_seconds": DAY_S})
        loop.gateway.redis.zadd(key_names.KEPT_EXPIRES, {f"{loop.model_id}|{name}|{number}": 1})
    assert await store.end_expired(most=1) == 1
    assert len(trainer.reader.dropped().weights) == 1, "so many in a round"
    assert [await store.end_expired() for _ in range(2)] == [1, 0]
    assert list(listed(loop)) == [TO_SAMPLE]
    gone = {(loop.model_id, TO_TRAIN), (loop.model_id, "weights/three")}
    assert set(trainer.reader.dropped().weights) == gone
    await redis.aclose()


def test_published_weights_are_for_every_key(loop: SamplingLoop) -> None:
    other = other_loop(loop)
    path, sampling = path_of(loop, TO_TRAIN), path_of(loop, TO_SAMPLE)

    def uses() -> list[int]:
        return [info(other, path), load(other, path), sampler_of(other, sampling, 7).status_code]

    assert uses() == [404, 404, 404]
    for name in (TO_TRAIN, TO_SAMPLE):
        assert send(loop.of_another_key(), "POST", f"{name}/publish").status_code == 404
        assert send(loop, "POST", f"{name}/publish").status_code == 204
    assert uses() == [200, 200, 200]
    public = {name: each["public"] for name, each in listed(loop).items()}
    assert public == {TO_TRAIN: True, TO_SAMPLE: True, "weights/three": False}
    assert listed(loop)[TO_TRAIN]["expires_at"] is not None, "its time goes on"
    for what in (TO_TRAIN, f"{TO_TRAIN}/publish"):
        assert send(loop.of_another_key(), "DELETE", what).status_code == 404
    for name in (TO_TRAIN, TO_SAMPLE):
        assert send(loop, "DELETE", f"{name}/publish").status_code == 204
    assert uses() == [404, 404, 404]
    assert not any(each["public"] for each in listed(loop).values())
    assert send(loop, "POST", f"{TO_TRAIN}/publish").status_code == 204, "and back again"


# Copies


def copy(of: SamplingLoop, by: SamplingLoop | None = None, **asked: Any) -> Any:
    """As SDK 0.30 asks."""
    by = by or of
    body = {"session_id": by.session_id, "model_seq_id": 7, "source_path": path_of(of, TO_TRAIN)}
    return by.post("copy_weights", {name: each for name, each in (body | asked).items() if each is not None})


def copied(loop: SamplingLoop) -> str:
    """The model that is made for a copy."""
    return f"{loop.session_id}:train:7"


def check_ended(loop: SamplingLoop, model_id: str) -> None:
    refused = loop.post("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})
    assert "takes no more commands" in refused.json()["error"]["message"]


def test_a_copy_is_a_checkpoint_of_a_model_that_takes_no_commands(
    loop: SamplingLoop, trainer: ScriptedTrainer
) -> None:
    made = copied(loop)
    for _ in range(2):  # an answer that was lost is asked for again
        reply = copy(loop, ttl_seconds=DAY_S)
        assert (reply.status_code, reply.json()["tinker_path"]) == (200, f"tinker://{made}/{TO_TRAIN}")
    commands = [each.command for each in trainer.seen if each.model_id == made]
    assert commands == [LoadWeights(loop.model_id, "one", True), SaveWeights("one")]
    (found,) = listed(loop, made).values()
    assert (found["checkpoint_type"], found["user_metadata"]) == ("training", None)
    assert found["expires_at"] > found["time"]
    check_ended(loop, made)
    assert send(loop, "DELETE", TO_TRAIN).status_code == 204
    assert copy(loop).status_code == 200, "it is there already"
    assert load(loop, f"tinker://{made}/{TO_TRAIN}", 8) == 200


def test_a_copy_that_lasts_longer_than_a_result_is_asked_for_again(
    loop: SamplingLoop, backends: Backends, trainer: ScriptedTrainer
) -> None:
    go_on, made, redis = threading.Event(), copied(loop), loop.gateway.redis
    trainer.result_of = lambda logged: (
        result_of(logged) if logged.number == 0 or go_on.wait(300) else CommandFailed("no test", "server")
    )
    trainer.go_on.clear()
    with backends.gateway(tinker={"poll_s": 0.2}) as impatient:
        other = replace(loop, gateway=impatient)
        assert copy(loop, other).status_code == 408
        trainer.go_on.set()
        first = key_names.result(request_id(made, 0))
        wait_until(lambda: redis.delete(first) == 1)  # as it expires
        assert copy(loop, other).status_code == 408
    go_on.set()
    wait_until(lambda: redis.hexists(key_names.kept(made), TO_TRAIN))  # before it is asked for
    assert copy(loop).status_code == 200
    check_ended(loop, made)


def test_a_copy_that_is_gone_is_not_answered_again(loop: SamplingLoop) -> None:
    made, redis = copied(loop), loop.gateway.redis
    assert copy(loop).status_code == 200
    over: Any = {f"{TO_TRAIN}#1": encode_record(KeptTerms(ttl_s=0.001))}
    redis.hset(key_names.kept_terms(made), mapping=over)
    assert copy(loop).status_code == 404, "its time is over"
    redis.delete(key_names.kept_terms(made))
    assert copy(loop).status_code == 200
    assert loop.call("DELETE", f"training_runs/{made}/checkpoints/{TO_TRAIN}").status_code == 204
    assert copy(loop).status_code == 404


def test_a_copy_goes_with_the_data_of_its_user(loop: SamplingLoop, backends: Backends) -> None:
    gateway = loop.gateway
    anns = SamplingLoop(gateway, loop.base_model).start(user_metadata={"user": "ann"})
    assert copy(loop, anns).status_code == 200
    anns.finish()
    with backends.gateway(tinker={"session_retention_s": 0.1}):
        wait_until(lambda: not gateway.redis.exists(key_names.client_session(anns.session_id)))
    assert gateway.redis.exists(key_names.model(copied(anns))), "it outlasts its session"
    assert gateway.admin("DELETE", "/users/ann/data").status_code == 200
    assert not gateway.redis.exists(key_names.model(copied(anns)))


def test_only_own_and_published_checkpoints_are_copied(loop: SamplingLoop) -> None:
    other = other_loop(loop)
    assert copy(loop, other).status_code == 404
    assert copy(loop, other, session_id=loop.session_id).status_code == 404
    send(loop, "POST", f"{TO_TRAIN}/publish")
    assert copy(loop, other).status_code == 200
    assert copy(loop, other, session_id=loop.session_id).status_code == 404, "into its own sessions only"
    assert len(listed(other, copied(other))) == 1


def test_what_cannot_be_copied_is_named(loop: SamplingLoop, trainer: ScriptedTrainer) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"destination_project_id": "p"}, "destination_project_id"),
        ({"destination_project_id": "p", "session_id": None, "model_seq_id": None}, "destination_project_id"),
        ({"weights_access_token": "t"}, "weights_access_token"),
        ({"session_id": None}, "session_id"),
        ({"model_seq_id": None}, "session_id"),
        ({"source_path": path_of(loop, TO_SAMPLE)}, "source_path"),
        ({"source_path": "x"}, "source_path"),
        ({"ttl_seconds": 1}, "ttl_seconds"),
    ]
    for asked, named in cases:
        refused = copy(loop, **asked)
        assert refused.status_code == 400, asked
        assert named in refused.json()["error"]["message"]
    body = {"session_id": loop.session_id, "model_seq_id": 7, "source_path": path_of(loop, TO_TRAIN)}
    token = {"X-Tinker-Weights-Access-Token": "t"}
    assert loop.post("copy_weights", body, headers=token).status_code == 400
    assert copy(loop, source_path=path_of(loop, "weights/none")).status_code == 404
    errors = ["there is no room", "there is no model"]
    trainer.result_of = lambda logged: CommandFailed(errors[logged.number], "user")
    failed = copy(loop)
    assert (failed.status_code, "there is no room" in failed.text) == (400, True)
    assert "made with other arguments" in copy(loop, model_seq_id=0).json()["error"]["message"]


# Exports

WEIGHTS = bytes(range(256)) * 5000
EXPORT = "external_weights/x"


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
def exported(
    gateway: RunningGateway, backends: Backends, trainer: ScriptedTrainer, files: Path
) -> SamplingLoop:
    """A client that has exported these files with its first command."""
    trainer.result_of = lambda logged: (
        Exported(str(files), 1234) if isinstance(logged.command, SaveExternal) else result_of(logged)
    )
    loop = SamplingLoop(gateway, str(backends.model_path)).start()
    saved = loop.done("save_weights_external", 1, path="x", ttl_seconds=DAY_S)
    assert saved == {"path": path_of(loop, EXPORT), "size_bytes": 1234, "type": "save_weights_external"}
    return loop


def asked_urls(loop: SamplingLoop) -> Any:
    return send(loop, "GET", f"{EXPORT}/external_weights_urls")


def url_of(loop: SamplingLoop, file: str = "adapter_config.json") -> str:
    reply = asked_urls(loop)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["urls"][file])


def status(loop: SamplingLoop, url: str) -> int:
    return loop.gateway.http.get(url).status_code


def test_an_export_has_a_path_and_is_listed(exported: SamplingLoop, trainer: ScriptedTrainer) -> None:
    path = path_of(exported, EXPORT)
    assert trainer.seen[-1].command == SaveExternal("x")
    (found,) = listed(exported).values()
    assert (found["checkpoint_id"], found["checkpoint_type"]) == (EXPORT, "external")
    assert (found["tinker_path"], found["size_bytes"], found["public"]) == (path, 1234, False)
    assert found["expires_at"] > found["time"]
    assert exported.post("weights_info", {"tinker_path": path}).json()["lora_rank"] == 8
    assert load(exported, path) == 400
    assert sampler_of(exported, path, 5).status_code == 400


def test_the_files_are_downloaded_without_a_key(exported: SamplingLoop) -> None:
    reply = asked_urls(exported).json()
    assert set(reply["urls"]) == {"adapter_config.json", "adapter_model.safetensors"}
    assert reply["expires"].endswith("+00:00")
    url = reply["urls"]["adapter_model.safetensors"]
    assert url.startswith(exported.gateway.url)
    with httpx.Client(timeout=120) as anyone:
        whole = anyone.get(url)
        assert (whole.status_code, whole.content) == (200, WEIGHTS)
        assert int(whole.headers["content-length"]) == len(WEIGHTS)
        part = anyone.get(url, headers={"range": "bytes=1000000-1000009"})
        assert (part.status_code, part.content) == (206, WEIGHTS[1000000:1000010])


def changed(url: str, **parts: str) -> str:
    return urlsplit(url)._replace(**parts).geturl()


def test_only_what_is_signed_is_given_and_only_in_time(
    exported: SamplingLoop, backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of(exported)
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
        assert status(exported, each) == 403, each
    for outside in ("..%2Fbeside", "../beside", "%2e%2e/beside", "%2Fetc%2Fhostname"):
        assert status(exported, changed(url, path=f"{folder}/{outside}")) in (403, 404), outside
    with backends.gateway() as second:  # another process, which has the same secret
        assert status(exported, changed(url, netloc=urlsplit(second.url).netloc)) == 200
    later_s = time.time() + 2 * 3600
    monkeypatch.setattr("gateway.tinker.checkpoints.now", lambda: later_s)
    assert "expired" in exported.gateway.http.get(url).json()["error"]["message"]


def test_a_file_that_became_a_link_is_not_followed(exported: SamplingLoop, files: Path) -> None:
    url = url_of(exported)
    (files / "adapter_config.json").unlink()
    assert status(exported, url) == 404
    (files / "adapter_config.json").symlink_to("/etc/hostname")
    assert status(exported, url) == 404


def test_other_keys_get_urls_only_of_what_is_published_and_none_outlasts_its_export(
    exported: SamplingLoop,
) -> None:
    url, other = url_of(exported), exported.of_another_key()
    assert asked_urls(other).status_code == 404
    assert send(exported, "POST", f"{EXPORT}/publish").status_code == 204
    assert status(exported, url_of(other)) == 200
    assert send(exported, "DELETE", EXPORT).status_code == 204
    assert (status(exported, url), asked_urls(exported).status_code) == (404, 404)
    exported.done("save_weights_external", 2, path="x")
    assert status(exported, url) == 404, "the name is used again, for other files"
    assert status(exported, url_of(exported)) == 200


def test_what_cannot_be_exported_or_downloaded_is_named(exported: SamplingLoop, files: Path) -> None:
    asked = exported.command("save_weights_external", 2, path="x", age_encryption_recipients=["age1x"])
    assert (asked.status_code, asked.json()["error"]["param"]) == (400, "age_encryption_recipients")
    assert exported.command("save_weights_external", 3, path="a/b").status_code == 400
    assert exported.command("save_weights_external", 4).status_code == 400
    exported.done("save_weights", 5, path="y")  # the numbers of refused commands are used up
    wrong = send(exported, "GET", "weights/y/external_weights_urls")
    assert (wrong.status_code, "is no export" in wrong.text) == (400, True)
    files.rename(files.with_name("away"))
    unreadable = asked_urls(exported)
    assert (unreadable.status_code, unreadable.json()["error"]["code"]) == (404, "files_unreachable")


def test_so_many_files_are_sent_at_once(exported: SamplingLoop, files: Path) -> None:
    with (files / "large").open("wb") as large:
        large.truncate(2**28)  # more than the buffers between two processes hold
    url = url_of(exported, "large")
    with httpx.Client(timeout=300) as http, ExitStack() as open_ones:
        for _ in range(MOST_DOWNLOADS):
            assert open_ones.enter_context(http.stream("GET", url)).status_code == 200
        before = exported.gateway.refusals.get("downloads_limit", 0)
        refused = http.get(url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "downloads_limit")
        assert refused.headers["retry-after"] == "5"
        assert exported.gateway.refusals["downloads_limit"] == before + 1
        open_ones.close()
        part = {"range": "bytes=0-9"}
        wait_until(lambda: http.get(url, headers=part).status_code == 206)
