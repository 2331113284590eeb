"""The location of weights is checked before any file is opened and any server is called."""

from pathlib import Path

import pytest

from rollout_queue.contract.published_policy import ObjectPrefix
from rollout_server.errors import LocationRefused
from rollout_server.weights.locations import FileLocation, HttpLocation, is_under, parse_location

ALLOWED = ["file:///srv/policies", "http://trainer:8200/weights", "s3://bucket/policies", "s3://whole-bucket"]


@pytest.mark.parametrize(
    "location",
    [
        "/srv/policies/v1",
        "ftp://trainer:8200/weights/1",
        "s3://srv/policies/v1",
        "file:///etc",
        "file:///srv/policies-of-others/v1",
        "file:///srv/policies/../../etc",
        "file:///srv/policies/%2e%2e/%2e%2e/etc",
        "file://elsewhere/srv/policies/v1",
        "file:///srv/policies/v1%00",
        "file:///srv/policies/v1?x=1",
        "http://trainer:8200/",
        "http://trainer:8200/weights-of-others/1",
        "http://trainer:8200/weights/../status",
        "http://trainer:8200/weights/%2e%2e/status",
        "http://trainer:8200/weights/1?x=1",
        "http://trainer:8200/weights/1#x",
        "http://trainer:8200/weights/1;x",
        "http://trainer:8200\\@evil/weights/1",
        "http://user:secret@trainer:8200/weights/1",
        "http://@trainer:8200/weights/1",
        "http://trainer:8201/weights/1",
        "http://trainer.evil:8200/weights/1",
        "https://trainer:8200/weights/1",
        "http://trainer:port/weights/1",
        "http://trainer:8200/weights/1\n",
        "s3://bucket",
        "s3://bucket/pol",
        "s3://bucket/policies-of-others/v1",
        "s3://bucket/policies/../others/v1",
        "s3://bucket/policies/./v1",
        "s3://bucket/policies//v1",
        "s3://bucket/policies/%2e%2e/v1",
        "s3://bucket/policies/v1?versionId=3",
        "s3://bucket/policies/v1#x",
        "s3://bucket/policies/v1;x",
        "s3://bucket/policies\\v1",
        "s3://bucket:9000/policies/v1",
        "s3://key:secret@bucket/policies/v1",
        "s3://bucket.evil/policies/v1",
        "s3://BUCKET/policies/v1",
        "s3:///policies/v1",
        "s3:bucket/policies/v1",
        "s3a://bucket/policies/v1",
        "https://bucket/policies/v1",
        "",
    ],
)
def test_a_location_under_no_prefix_is_refused(location: str) -> None:
    with pytest.raises(LocationRefused) as refused:
        parse_location(location, ALLOWED)
    assert "secret" not in str(refused.value)


def test_a_location_under_a_prefix_is_allowed() -> None:
    file = parse_location("file:///srv/policies/v00000001/", ALLOWED)
    assert isinstance(file, FileLocation)
    assert file.directory == Path("/srv/policies/v00000001")
    assert parse_location("http://trainer:8200/weights/1/", ALLOWED) == HttpLocation(
        "http://trainer:8200/weights/1"
    )


@pytest.mark.parametrize(
    ("location", "place"),
    [
        ("s3://bucket/policies/v1/", ObjectPrefix("bucket", "policies/v1")),
        ("s3://bucket/policies", ObjectPrefix("bucket", "policies")),
        ("s3://whole-bucket/a/v1", ObjectPrefix("whole-bucket", "a/v1")),
    ],
)
def test_a_prefix_in_an_object_store_is_allowed(location: str, place: ObjectPrefix) -> None:
    assert parse_location(location, ALLOWED) == place
    assert place.url == location.rstrip("/")


def test_a_default_port_may_be_left_out() -> None:
    assert is_under("http://trainer:80/weights/1", "http://trainer/weights")
    assert not is_under("http://trainer/weights/1", "https://trainer/weights")


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    policies, secret = tmp_path / "policies", tmp_path / "secret"
    (policies / "v1").mkdir(parents=True)
    secret.mkdir()
    (policies / "link").symlink_to(secret)
    (policies / "v1" / "model.safetensors").symlink_to(secret / "key")
    (policies / "inside").symlink_to(policies / "v1")
    allowed = [policies.as_uri()]
    for directory, name in (("link", ""), ("v1", "model.safetensors")):
        place = parse_location((policies / directory).as_uri(), allowed)
        assert isinstance(place, FileLocation)
        with pytest.raises(LocationRefused):
            place.resolve(name)
    inside = parse_location((policies / "inside").as_uri(), allowed)
    assert isinstance(inside, FileLocation)
    assert inside.resolve() == (policies / "v1").resolve()
