"""Gateways whose Redis fails over, or is shared with another deployment."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from rollout_queue.redis import keys
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway
from tests.support.queue.load import NOBODY
from tests.support.queue.servers import WatchedMaster
from tests.support.waiting import wait_until
from weir.audit.audit import audit
from weir.audit.facts import ClientAnswer
from weir.audit.sources import Sources

CLIENTS = 4


class Client:
    """Calls again and again in a session of its own, and notes what it was told."""

    def __init__(self, gateway: RunningGateway) -> None:
        self._gateway, self._stopping = gateway, threading.Event()
        self._session = gateway.session()
        self.answers, self.statuses = list[ClientAnswer](), set[int]()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with closing(httpx.Client(timeout=300)) as http:
            own = RunningGateway(self._gateway.url, self._gateway.engine, self._gateway.redis, http)
            session = self._session
            path = f"/sessions/{session['session_id']}/v1/chat/completions"
            while not self._stopping.is_set():
                reply = own.chat("hi", path=path, key=session["api_key"])
                self.statuses.add(reply.status_code)
                if reply.status_code == 200:
                    turn_id = reply.headers["x-weir-turn-id"]
                    self.answers.append(ClientAnswer(session["session_id"], turn_id=turn_id))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[WatchedMaster]:
    found = WatchedMaster(tmp_path / "servers")
    found.master.client.hset(keys.POLICIES, "0", "{}")
    yield found
    found.close()


def test_clients_get_answers_that_stay_or_a_503(
    backends: Backends, watched: WatchedMaster, tmp_path: Path
) -> None:
    settings = {"redis_url": watched.url, "redis_wait_replicas": 2, "redis_wait_timeout_s": 3.0}
    with backends.gateway(**settings) as gateway:
        clients = [Client(gateway) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        wait_until(lambda: all(client.answers for client in clients))
        master = watched.master
        master.kill()
        watched.fail_over(master)
        for client in clients:
            client.stop()
        told = [answer for client in clients for answer in client.answers]
        assert set().union(*(client.statuses for client in clients)) <= {200, 503}
        assert gateway.chat().status_code == 200
    (tmp_path / "none").mkdir()
    report = audit(Sources(watched.url, NOBODY, checkpoint_dir=tmp_path / "none"), told, readings=1)
    assert report.findings == ()
    assert len(told) > CLIENTS


def test_deployments_with_two_prefixes_share_a_redis(gateway: RunningGateway, backends: Backends) -> None:
    before = set(backends.redis.scan_iter())
    with backends.gateway(redis_key_prefix="other") as other:
        session = other.session(group_id="g", user="u")
        path = f"/sessions/{session['session_id']}/v1"
        assert other.chat("hi", path=f"{path}/chat/completions", key=session["api_key"]).status_code == 200
        body = {"input": "hi", "store": True}
        assert other.post(f"{path}/responses", body, key=session["api_key"]).status_code == 200
        done = other.post(f"/sessions/{session['session_id']}/finish", {"status": "completed", "reward": 1.0})
        assert done.status_code == 200
        assert other.get("/admin/pipeline", key=ADMIN_KEY).status_code == 200
        assert gateway.get(f"/sessions/{session['session_id']}").status_code == 404
        new = set(backends.redis.scan_iter()) - before
    assert {key for key in new if not key.startswith(b"weir:")} >= {b"other:stream", b"other:sessions"}
    assert not any(session["session_id"].encode() in key for key in new if key.startswith(b"weir:"))
    backends.redis.delete(*(key for key in new if key.startswith(b"other:")))
