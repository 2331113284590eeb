"""Files by OpenAI's client, and what is wrong with hostile ones, told by line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fine_tuning.settings import FineTuningLimits
from fine_tuning.training_files import RowFile
from tests.support.environments.running import RunTest, running_gateway
from tests.support.fine_tuning.running import RunningJobs, client_of, fine_tuning, jsonl, sums

USER = {"role": "user", "content": "hi"}
WORDS = "\n" + json.dumps({"messages": [{"role": "user", "content": "caf\xe9"}]}, ensure_ascii=False) + "\n"


@pytest.fixture(scope="module")
def refusing(
    redis_url: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningJobs]:
    """A service whose jobs are all refused."""
    directory = tmp_path_factory.mktemp("refusing")
    with (
        running_gateway(redis_url, tiny_model, directory) as running,
        fine_tuning(directory / "jobs", running.url) as service,
    ):
        yield service


def test_a_file_is_stored_listed_read_and_deleted(service: RunningJobs) -> None:
    files = service.openai.files
    content = jsonl(sums(3)) + b"\r\n--boundary\r\n"
    first = files.create(file=("a rows.jsonl", content), purpose="fine-tune")
    assert (first.object, first.purpose, first.bytes) == ("file", "fine-tune", len(content))
    assert first.filename == "a rows.jsonl"
    second = files.create(file=("b.jsonl", b"{}"), purpose="fine-tune")
    assert files.content(first.id).read() == content
    assert files.retrieve(second.id).id == second.id
    assert [each.id for each in files.list(limit=1)] == [second.id, first.id]
    assert [each.id for each in files.list(order="asc")] == [first.id, second.id]
    assert list(files.list(purpose="batch")) == []
    assert files.delete(first.id).deleted
    for call in (files.retrieve, files.content, files.delete):
        with pytest.raises(openai.NotFoundError):
            call(first.id)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\n\n", "the file has no rows"),
        (b"hello\n", "line 1 is no JSON"),
        (b"[1]\n", "line 1 is no JSON object"),
        (jsonl(sums(2)) + b'{"messages": [', "line 3 is no JSON"),
        (b'{"messages": NaN}\n', "line 1 is no JSON"),
        (b"\xff\xfe\n", "line 1 is no JSON: it is in UTF-16: write it in UTF-8"),
        (WORDS.encode("utf-16"), "line 1 is no JSON: it is in UTF-16: write it in UTF-8"),
        (WORDS.encode("cp1252"), "line 2 is no JSON: its byte 47, 0xe9, is not UTF-8"),
        (jsonl(sums(2)) + WORDS.encode("latin-1")[:-3], "line 4 is no JSON: its byte 47, 0xe9, is not UTF-8"),
        (b"[" * 100_000 + b"\n", "line 1 is no JSON"),
        (jsonl([{"prompt": "hi"}]), "line 1: messages must be a list"),
        (jsonl([{"messages": []}]), "line 1: messages must be a list"),
        (jsonl([{"messages": ["hi"]}]), "line 1: messages[0] is no object"),
        (
            jsonl([{"messages": [{"role": "tool", "content": "x"}]}]),
            "line 1: messages[0].role must be one of",
        ),
        (jsonl([{"messages": [USER, {"role": "assistant", "content": "x"}]}]), "must have the role 'user'"),
        (jsonl([{"messages": [{"role": "user", "content": 1}]}]), "line 1: messages[0].content must be"),
        (
            jsonl([{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}]),
            "line 1: messages[0].content[0] must be a part of the type 'text'",
        ),
        (jsonl([{"messages": [USER] * 300}]), "line 1 has more than 256 messages"),
        (jsonl([{"messages": [USER], "tools": "x"}]), "line 1: tools must be a list of objects"),
        (jsonl([{"messages": [USER], **{str(n): 0 for n in range(2000)}}]), "more than 1000 fields"),
        (jsonl([{"messages": [USER], **{str(n): 0 for n in range(10**6)}}]), "longer than 1048576 bytes"),
        (jsonl([*sums(1), {"messages": [USER], "x": "y" * 2**20}]), "line 2 is longer than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_training_file_makes_no_job(
    refusing: RunningJobs, content: bytes, reason: str
) -> None:
    for field in ("training_file", "validation_file"):
        given = refusing.upload(content)
        body = {"validation_file": given} if field == "validation_file" else {"training_file": given}
        with pytest.raises(openai.BadRequestError) as refused:
            refusing.openai.fine_tuning.jobs.create(
                **{"model": "policy", "training_file": refusing.upload(sums(1)), "method": method()} | body
            )
        assert reason in refused.value.message
        assert refused.value.param == field
    assert list(refusing.openai.fine_tuning.jobs.list()) == []


def test_a_byte_order_mark_of_utf_8_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + jsonl(sums(2)))
    rows = RowFile(path, FineTuningLimits())
    assert [rows.row(number).item for number in range(len(rows))] == sums(2)


def method(**more: Any) -> Any:
    grader = {"type": "string_check", "name": "a", "input": "a", "reference": "b", "operation": "eq"}
    return {"type": "reinforcement", "reinforcement": {"grader": grader, **more}}


def test_bounds_on_files(running: RunTest, tmp_path: Path) -> None:
    limits = {"file_bytes": 2048, "files": 3, "stored_bytes": 4096, "rows": 2}
    with fine_tuning(tmp_path / "few", running.url, limits=limits) as service:
        with pytest.raises(openai.APIStatusError, match="larger than 2048 bytes") as refused:
            service.upload(b"x" * 2049)
        assert refused.value.status_code == 413
        with pytest.raises(openai.APIStatusError) as refused:
            service.upload(b"x" * 2**20)
        assert refused.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="more than 2 rows"):
            service.start(sums(3))
        first = service.upload(b"x" * 2048)
        with pytest.raises(openai.BadRequestError, match="more than 4096 bytes"):
            service.upload(b"x" * 2048)
        service.upload(b"x")
        with pytest.raises(openai.BadRequestError, match="3 files are stored"):
            service.upload(b"x")
        service.openai.files.delete(first)
        service.upload(b"x")


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=x", b""),
        ("multipart/form-data; boundary=x", b"--x\r\n"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\nabc\r\n--x--\r\n"),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\nabc\r\n--x--"),
        ("multipart/form-data; boundary=x", b"--x\r\n" * 1000 + b"--x--"),
        ("multipart/form-data; boundary=x", b"--x\r\na: " + b"b" * 10_000 + b"\r\n\r\nabc\r\n--x--"),
        ("multipart/form-data; boundary=\xff", b"--x--"),
        (
            "multipart/form-data; boundary=x",
            b"--x\r\nContent-Disposition: form-data; name=a; filename*=idna''%ff\r\n\r\nabc\r\n--x--",
        ),
        (
            "multipart/form-data; boundary=x",
            b"--x\r\nContent-Disposition: form-data; name=a; filename*=\x00''a\r\n\r\nabc\r\n--x--",
        ),
    ],
)
def test_a_body_that_is_no_upload_is_refused(refusing: RunningJobs, content_type: str, body: bytes) -> None:
    headers = {b"content-type": content_type.encode("latin-1")}
    reply = httpx.post(f"{refusing.url}/v1/files", content=body, headers=headers, timeout=120)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_file_keeps_its_name(refusing: RunningJobs) -> None:
    body = (
        '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
        '--x\r\nContent-Disposition: form-data; name="file"; filename="Zeilen für heute.jsonl"'
        "\r\n\r\nabc\r\n--x--"
    )
    headers = {"content-type": "multipart/form-data; boundary=x"}
    reply = httpx.post(f"{refusing.url}/v1/files", content=body.encode(), headers=headers, timeout=120)
    assert reply.json()["filename"] == "Zeilen für heute.jsonl"


@pytest.mark.parametrize(
    "form",
    [{"name": "\ud800"}, {"\ud800": 1}, {"name": float("nan")}, json.loads('{"a":' * 400 + "1" + "}" * 400)],
)
def test_a_format_that_cannot_be_stored_makes_no_job(refusing: RunningJobs, form: Any) -> None:
    made = method(response_format={"type": "json_schema", "json_schema": form})
    body = {"model": "policy", "training_file": refusing.upload(sums(1)), "method": made}
    headers = {"content-type": "application/json"}
    url = f"{refusing.url}/v1/fine_tuning/jobs"
    reply = httpx.post(url, content=json.dumps(body).encode(), headers=headers, timeout=300)
    named = "method.reinforcement.response_format"
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, named)
    assert list(refusing.openai.fine_tuning.jobs.list()) == []


def test_an_upload_of_another_kind_is_refused_by_name(refusing: RunningJobs) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        refusing.openai.files.create(file=("a", b"x"), purpose="batch")
    assert refused.value.param == "purpose"
    with pytest.raises(openai.BadRequestError) as refused:
        refusing.openai.files.create(
            file=("a", b"x"),
            purpose="fine-tune",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
    assert str(refused.value.param).startswith("expires_after")
    with pytest.raises(openai.BadRequestError, match="the file is empty"):
        refusing.upload(b"")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"method": None}, "method"),
        ({"method": {"type": "supervised", "supervised": {}}}, "method.type"),
        ({"method": {"type": "dpo"}}, "method.type"),
        ({"method": method(hyperparameters={"batch_size": 4})}, "…batch_size"),
        ({"method": method(hyperparameters={"learning_rate_multiplier": 2.0})}, "…learning_rate_multiplier"),
        ({"method": method(hyperparameters={"n_epochs": 0})}, "…n_epochs"),
        ({"method": method(hyperparameters={"compute_multiplier": -1})}, "…compute_multiplier"),
        ({"method": method(hyperparameters={"eval_samples": 2})}, "…eval_samples"),
        ({"method": method(hyperparameters={"reasoning_effort": "huge"})}, "…reasoning_effort"),
        ({"method": method(hyperparameters={"warmth": 1})}, "…warmth"),
        ({"method": method(grader={"type": "string_check"})}, "method.reinforcement.grader"),
        ({"suffix": "mine"}, "suffix"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "integrations"),
        ({"hyperparameters": {"n_epochs": 1}}, "hyperparameters"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"seed": -1}, "seed"),
        ({"model": "gpt-4o-mini"}, "model"),
        ({"training_file": "file-none"}, "training_file"),
        ({"validation_file": "file-none"}, "validation_file"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    refusing: RunningJobs, change: dict[str, Any], param: str
) -> None:
    body = {"model": "policy", "training_file": refusing.upload(sums(1)), "method": method()} | change
    reply = httpx.post(f"{refusing.url}/v1/fine_tuning/jobs", json=body, timeout=300)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert str(error["param"]).startswith(param.replace("…", "method.reinforcement.hyperparameters."))
    assert param.rpartition(".")[2].strip("…") in json.dumps(error)
    assert list(refusing.openai.fine_tuning.jobs.list()) == []


def test_auto_and_nothing_are_served(service: RunningJobs) -> None:
    auto = dict.fromkeys(
        ("batch_size", "learning_rate_multiplier", "n_epochs", "eval_interval", "compute_multiplier"), "auto"
    )
    body: dict[str, Any] = {
        "suffix": None,
        "integrations": [],
        "validation_file": None,
        "metadata": None,
        "seed": None,
    }
    assert service.start(sums(1), body=body, **auto).status == "queued"


def test_every_route_needs_an_admin_key(running: RunTest, tmp_path: Path) -> None:
    with fine_tuning(tmp_path / "locked", running.url, "boss", client_keys=["guest"]) as service:
        assert list(service.openai.files.list()) == []
        with client_of(service.url, "guest") as guest, client_of(service.url, "stranger") as stranger:
            for call in (guest.files.list, guest.fine_tuning.jobs.list):
                with pytest.raises(openai.PermissionDeniedError):
                    call()
            with pytest.raises(openai.PermissionDeniedError):
                RunningJobs(service.url, guest).upload(b"x")
            with pytest.raises(openai.AuthenticationError):
                stranger.files.list()
