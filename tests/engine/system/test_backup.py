"""A backup of real processes under load, restored elsewhere, where a real gateway and trainer go on."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import pytest
from tokenizers import Tokenizer

from rollout_queue.redis import key_names
from tests.support.gateway.conversation import path_of
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway
from tests.support.redis_process import RedisProcess
from tests.support.system.local_system import LocalSystem, Service, open_local_system
from tests.support.waiting import wait_until
from weir.audit.audit_facts import ClientAnswer
from weir.audit.audit_sources import Sources
from weir.backup.backup import BackupPlan, back_up
from weir.backup.restore import RestoreTarget, restore

pytestmark = pytest.mark.long
PATIENCE_S = 240.0


@pytest.fixture
def make(tiny_model: Path, tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Callable[[str], LocalSystem]]:
    with ExitStack() as stack:

        def made(name: str) -> LocalSystem:
            redis = RedisProcess(tmp_path / name / "redis").start()
            stack.callback(redis.close)
            backends = Backends(redis.url, tiny_model, tokenizer, redis.client, FakeEngine(tokenizer))
            return open_local_system(backends, redis, tmp_path / name, stack)

        yield made


def play(gateway: RunningGateway, heard: list[ClientAnswer]) -> None:
    """A group of two sessions, of which one earns a reward."""
    for reward, session in enumerate(gateway.post("/groups", {"size": 2}).json()["sessions"]):
        reply = gateway.chat("go on", path=path_of(session))
        assert reply.status_code == 200, reply.text
        heard.append(ClientAnswer(session["session_id"], reply.headers["x-weir-turn-id"]))
        ending = {"status": "completed", "reward": float(reward)}
        assert gateway.post(f"/sessions/{session['session_id']}/finish", ending).status_code == 200


def started(local: LocalSystem) -> tuple[RunningGateway, Service]:
    service, gateway = local.gateway(POLL_EVERY_S="0.2")
    return gateway, local.trainer(service, ALGORITHM__MIN_LIVE_ROWS="2", CHECKPOINT_EVERY_STEPS="1")


def newest(local: LocalSystem) -> int:
    """The highest version number that anything in Redis has."""
    reserved = local.redis.client.hget(key_names.RESERVED, "version")
    return int(reserved or 0)


def test_what_was_backed_up_under_load_goes_on_elsewhere(
    make: Callable[[str], LocalSystem], tmp_path: Path
) -> None:
    here = make("here")
    gateway, trainer = started(here)
    heard: list[ClientAnswer] = []
    over = Event()

    def agents() -> None:
        while not over.is_set():
            play(gateway, heard)

    load = Thread(target=agents)
    load.start()
    try:
        wait_until(lambda: newest(here) >= 2 and (here.checkpoints / "CURRENT").exists(), PATIENCE_S)
        told = list(heard)
        plan = BackupPlan(
            sources=Sources(here.redis.url, trainer.url, ADMIN_KEY),
            checkpoint_dir=here.checkpoints,
            policies_dir=here.root / "policies",
        )
        manifest = back_up(plan, tmp_path / "backup", lambda _: None)
        at = newest(here)
        wait_until(lambda: newest(here) > at, PATIENCE_S)  # the training has gone on meanwhile
    finally:
        over.set()
        load.join()
        trainer.close()
    assert manifest.step is not None
    assert manifest.step >= 1

    there = make("there")
    restore(
        tmp_path / "backup",
        RestoreTarget(
            redis_url=there.redis.url,
            checkpoint_dir=there.checkpoints,
            policies_dir=there.root / "policies",
        ),
        lambda _: None,
    )
    assert there.audit(told).findings == ()
    before = newest(there)
    gateway, trainer = started(there)
    trainer.until("/ready")
    for _ in range(3):
        play(gateway, told)
    wait_until(lambda: trainer.until("/status")["step"] > manifest.step, PATIENCE_S)
    wait_until(lambda: newest(there) > before, PATIENCE_S)
    assert there.audit(told, trainer).findings == ()
    assert trainer.until("/status")["version"] > (manifest.version or 0)
    trainer.close()
    assert there.audit(told).findings == ()
