"""How services introduce themselves to Redis: by passwords and certificates, with the least rights."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from redis import Redis
from redis.exceptions import NoPermissionError

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import key_names
from rollout_queue.redis.lease import Lease
from rollout_queue.redis.redis_client import open_async_redis, open_redis
from rollout_queue.redis.settings import RedisSettings, read_address, without_password
from rollout_queue.redis.stream_reader import StreamReader
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.queue.certificates import Authority
from tests.support.queue.programs import KINDS, UNPACKED, program_of
from tests.support.queue.records import outcome, spec, turn
from tests.support.queue.servers import RedisServer
from tests.support.waiting import PATIENCE_S

PASSWORD = "s3cret@/:%"
ENCODED = "s3cret%40%2F%3A%25"
DOCUMENT = Path(__file__).parents[3] / "docs" / "redis.md"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that asks for a password."""
    server = RedisServer(tmp_path / "redis", f'requirepass "{PASSWORD}"')
    yield server.start(client=Redis(port=server.port, password=PASSWORD))
    server.close()


async def recorded(settings: RedisSettings, session_id: str = "s") -> None:
    """Write a session as a gateway does."""
    redis = open_async_redis(settings, timeout_s=PATIENCE_S)
    writer = StreamWriter(redis)
    try:
        await writer.open_session(spec(session_id))
        await writer.append_turn(turn(f"{session_id}-t", session_id), expires_at=1e12)
        await writer.append_outcome(outcome(session_id), None, None)
    finally:
        await writer.close()
        await redis.aclose()


def delivered(settings: RedisSettings) -> list[str]:
    """Read and acknowledge as a trainer does; the sessions of all records."""
    with closing(open_redis(settings, timeout_s=PATIENCE_S)) as redis:
        lease = Lease(redis, 10)
        assert lease.claim() is None
        reader = StreamReader(redis, lease.token)
        entries = [*reader.reclaim(), *reader.read(100, 0.01)]
        reader.acknowledge([entry.entry_id for entry in entries], Verdicts({}, {}))
        lease.release()
    return [entry.record.session_id for entry in entries]


def test_the_url_has_a_password_and_a_database(guarded: RedisServer) -> None:
    settings = RedisSettings(redis_url=f"redis://default:{ENCODED}@{guarded.address}/3")
    asyncio.run(recorded(settings))
    assert delivered(settings) == ["s", "s"]
    with closing(Redis(port=guarded.port, password=PASSWORD, db=3)) as client:
        assert client.hexists(key_names.session("s"), "t:s-t")


def test_a_password_file_is_read_whenever_a_connection_is_opened(
    guarded: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    settings = RedisSettings(redis_url=f"redis://:old@{guarded.address}/0", redis_password_file=file)

    async def gateway() -> None:
        redis = open_async_redis(settings, timeout_s=PATIENCE_S)
        writer = StreamWriter(redis)
        await writer.open_session(spec("one"))
        assert not caplog.records, "no library warns of how the file is read"
        guarded.client.config_set("requirepass", "another")
        guarded.client.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(StorageUnavailable) as refused:
            await writer.open_session(spec("two"))
        assert PASSWORD not in str(refused.value)
        file.write_text("another")
        await writer.open_session(spec("three"))
        file.unlink()
        guarded.client.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(StorageUnavailable, match=r"password file .* cannot be read"):
            await writer.open_session(spec("four"))
        await writer.close()
        await redis.aclose()

    asyncio.run(gateway())


def test_a_wrong_password_is_in_no_error(guarded: RedisServer) -> None:
    settings = RedisSettings(redis_url=f"redis://:not-{ENCODED}@{guarded.address}/0")
    with (
        closing(open_redis(settings, timeout_s=PATIENCE_S)) as redis,
        pytest.raises(StorageUnavailable) as refused,
    ):
        Lease(redis, 10).claim()
    assert "s3cret" not in f"{refused.value!r} {refused.value.__cause__!r} {redis!r}"


@pytest.mark.parametrize(
    "url",
    [
        "http://:s3cret@host/0",
        "redis://:s3cret@host:port/0",
        "redis://:s3/cret@host/0",
        "redis://:s3cret@h1,h2/0",
        "redis+sentinel://:s3cret@h1,h2",
        "redis+cluster://:s3cret@h1,h2/4",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(ValidationError) as refused:
        RedisSettings(redis_url=url)
    assert "s3cret" not in str(refused.value)
    assert "cret@" not in str(refused.value)


def test_an_address_is_read_from_each_kind_of_url() -> None:
    sentinel = read_address("rediss+sentinel://me:pw@h1:1,[::1]:2,h3/mymaster/5?socket_timeout=3")
    assert sentinel.nodes == (("h1", 1), ("::1", 2), ("h3", 26379))
    assert (sentinel.kind, sentinel.master, sentinel.tls) == ("sentinel", "mymaster", True)
    assert sentinel.fields == {"username": "me", "password": "pw", "db": 5, "socket_timeout": 3.0}
    cluster = read_address("redis+cluster://:pw@h1:1,h2")
    assert (cluster.nodes, cluster.fields) == ((("h1", 1), ("h2", 6379)), {"password": "pw"})
    assert read_address("unix:///run/redis.sock?db=2").fields == {"path": "/run/redis.sock", "db": 2}
    assert (
        without_password("rediss+sentinel://me:p@w@h1:1,h2/m/5?password=x") == "rediss+sentinel://h1:1,h2/m/5"
    )


@pytest.fixture(scope="module", params=UNPACKED)
def secured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RedisServer, Authority]]:
    """A server that speaks TLS alone, with a certificate for 127.0.0.1, and asks clients for theirs."""
    directory = tmp_path_factory.mktemp("tls")
    authority = Authority(directory / "certificates")
    server = RedisServer(directory / "redis", program=program_of(request.param))
    certificate, key = authority.sign("server", "127.0.0.1")
    own, own_key = authority.sign("gateway")
    tls: dict[str, Any] = {"ssl_ca_certs": str(authority.file)}
    client = Redis(port=server.port, ssl=True, ssl_certfile=str(own), ssl_keyfile=str(own_key), **tls)
    flags = ["--port", "0", "--tls-port", str(server.port), "--tls-ca-cert-file", str(authority.file)]
    flags += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    client.connection_pool.connection_kwargs["host"] = "127.0.0.1"
    yield server.start(*flags, client=client), authority
    server.close()


def with_certificate(secured: tuple[RedisServer, Authority], **other: Any) -> RedisSettings:
    server, authority = secured
    given: dict[str, Any] = {
        "redis_url": f"rediss://{server.address}/0?socket_connect_timeout=300",
        "redis_ca_file": authority.file,
        "redis_certificate_file": authority.file.with_name("gateway.crt"),
        "redis_key_file": authority.file.with_name("gateway.key"),
    }
    return RedisSettings(**given | other)


def test_tls_with_certificates_on_both_sides(secured: tuple[RedisServer, Authority]) -> None:
    settings = with_certificate(secured)
    secured[0].client.flushall()
    asyncio.run(recorded(settings))
    assert delivered(settings) == ["s", "s"]


@pytest.mark.parametrize("fault", ["no certificate", "another authority", "another host"])
def test_tls_refuses_whom_it_does_not_know(
    secured: tuple[RedisServer, Authority], tmp_path: Path, fault: str
) -> None:
    faults: dict[str, dict[str, Any]] = {
        "no certificate": {"redis_certificate_file": None, "redis_key_file": None},
        "another authority": {"redis_ca_file": Authority(tmp_path / "another").file},
        "another host": {"redis_url": f"rediss://localhost:{secured[0].port}/0?socket_connect_timeout=300"},
    }
    settings = with_certificate(secured, **faults[fault])
    with pytest.raises(StorageUnavailable):
        asyncio.run(recorded(settings))
    with pytest.raises(StorageUnavailable):
        delivered(settings)
    if fault == "another host":
        unchecked = settings.model_copy(update={"redis_check_hostname": False})
        asyncio.run(recorded(unchecked))


@pytest.mark.parametrize("kind", KINDS)
def test_a_user_with_the_documented_rights_can_do_what_services_do(tmp_path: Path, kind: str) -> None:
    """The line of docs/redis.md. The server keeps what it refused in ACL LOG."""
    line = re.search(r"^user weir .*$", DOCUMENT.read_text(), re.MULTILINE)
    assert line, "docs/redis.md has the line"
    rights = line[0].replace(">PASSWORD", ">pw").removeprefix("user weir ").split()
    server = RedisServer(tmp_path / "redis", program=program_of(kind)).start()
    administrator: Any = server.client
    administrator.execute_command("ACL SETUSER", "weir", *rights)
    settings = RedisSettings(redis_url=f"redis://weir:pw@{server.address}/0")
    try:
        asyncio.run(recorded(settings))
        assert delivered(settings) == ["s", "s"]
        # redis-py tries to give its name, and goes on without.
        assert {each["object"] for each in server.client.acl_log()} <= {"client", "client|setinfo"}
        with closing(open_redis(settings, timeout_s=PATIENCE_S)) as redis, pytest.raises(NoPermissionError):
            redis.get("another:key")
    finally:
        server.close()
