"""`weir backup` and `weir restore`, on a real Redis and real checkpoints, at every moment that could go
wrong."""

import json
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis
from typer.testing import CliRunner

from rollout_queue.contract.published_policy import MANIFEST, STABLE, PolicyRecord
from rollout_queue.contract.serving_plan import Admissible, ServingPlan
from rollout_queue.redis import key_names
from tests.support.redis_clients import redis_at
from tests.support.redis_process import RedisProcess
from tests.support.serving import NOBODY, free_port
from tests.support.threads import meanwhile
from tests.support.weir.small_trainer import SmallTrainer, answer
from weir.__main__ import app
from weir.audit.audit import audit
from weir.audit.audit_facts import ClientAnswer
from weir.audit.audit_sources import Sources
from weir.backup import backup as backups
from weir.backup import redis_copy
from weir.backup.backup import BackupPlan, back_up
from weir.backup.manifest import BackupBroken, BackupManifest
from weir.backup.point import MARK
from weir.backup.restore import RestoreTarget, restore
from weir.errors import StackError


class Place:
    """A Redis with the directories of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.redis = RedisProcess(directory / "redis").start()
        self.client = self.redis.client
        self.checkpoints, self.policies = directory / "checkpoints", directory / "policies"

    def plan(self, **more: Any) -> BackupPlan:
        sources = Sources(self.redis.url, NOBODY)
        return BackupPlan(
            sources=sources, checkpoint_dir=self.checkpoints, policies_dir=self.policies, **more
        )

    def target(self, **more: Any) -> RestoreTarget:
        return RestoreTarget(
            redis_url=self.redis.url, checkpoint_dir=self.checkpoints, policies_dir=self.policies, **more
        )

    def publish(self, version: int) -> None:
        path = self.policies / f"v{version:08d}"
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(b"m" * version)
        (path / MANIFEST).write_text("{}")
        (path / STABLE).touch()
        record = PolicyRecord(version=version, location=path.resolve().as_uri(), created_at=1.0)
        self.client.hset(key_names.POLICIES, str(version), msgspec.json.encode(record))

    def audited(self, answers: list[str]) -> list[str]:
        """The findings of `weir audit`, with what clients were told."""
        told = [ClientAnswer(session_id, f"{session_id}-t") for session_id in answers]
        sources = Sources(self.redis.url, None, checkpoint_dir=self.checkpoints)
        return [finding.sentence for finding in audit(sources, told, readings=1).findings]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    made: list[Place] = []

    def make(name: str) -> Place:
        made.append(Place(tmp_path / name))
        return made[-1]

    yield make
    for each in made:
        each.redis.close()


@pytest.fixture
def run(place: Callable[[str], Place]) -> Place:
    found = place("run")
    found.checkpoints.mkdir()
    found.client.hset(key_names.POLICIES, "0", msgspec.json.encode(PolicyRecord(version=0, created_at=1.0)))
    return found


@pytest.fixture
def trained(run: Place) -> Place:
    """A run that has trained one session. Its trainer, which lives on, has written a checkpoint."""
    trainer = SmallTrainer(run.client, run.checkpoints)
    answer(run.client, "s1")
    trainer.train()
    trainer.checkpoint()
    return run


def trained_once(run: Place, sessions: int) -> tuple[SmallTrainer, list[str]]:
    """A trainer that has written a checkpoint after its first step, and has made a second one. Most of the
    sessions still wait."""
    answers = [f"s{number}" for number in range(sessions)]
    for session_id in answers:
        answer(run.client, session_id)
    trainer = SmallTrainer(run.client, run.checkpoints)
    trainer.train()
    trainer.checkpoint()
    trainer.train()
    return trainer, answers


def back_up_to(directory: Path, place: Place, **more: Any) -> BackupManifest:
    return back_up(place.plan(**more), directory, lambda _: None)


def restore_to(place: Place, directory: Path, **more: Any) -> BackupManifest:
    return restore(directory, place.target(**more), lambda _: None)


def continued(elsewhere: Place, answers: list[str]) -> SmallTrainer:
    """Train all that waits in a restored place, and audit it before and after."""
    assert elsewhere.audited(answers) == []
    trainer = SmallTrainer(elsewhere.client, elsewhere.checkpoints)
    before = trainer.step
    while True:
        step = trainer.step
        trainer.train()
        trainer.checkpoint()
        if trainer.step == step:
            break
    assert trainer.step >= before
    assert elsewhere.audited(answers) == []
    for session_id in answers:
        stored: Any = elsewhere.client.hget(key_names.session(session_id), "verdict")
        assert json.loads(stored)["code"] == "trained"
    return trainer


@pytest.mark.parametrize("moment", ["before", "written", "acknowledged", "stepped"])
def test_at_each_moment_around_a_checkpoint_nothing_is_lost_or_trained_twice(
    run: Place, place: Callable[[str], Place], tmp_path: Path, moment: str
) -> None:
    trainer, answers = trained_once(run, 30)

    def take(now: str) -> None:
        if now == moment:
            back_up_to(tmp_path / "backup", run)

    take("before")
    trainer.checkpoint(written=lambda: take("written"), acknowledged=lambda: take("acknowledged"))
    trainer.train()
    take("stepped")
    trainer.checkpoint()
    elsewhere = place("elsewhere")
    manifest = restore_to(elsewhere, tmp_path / "backup")
    assert (manifest.step, manifest.version) == ((1, 1) if moment == "before" else (2, 2))
    assert continued(elsewhere, answers).step == 6


def test_a_checkpoint_that_is_finished_just_then_is_noticed_and_the_copy_repeated(
    run: Place, place: Callable[[str], Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, answers = trained_once(run, 20)
    copy, finished = redis_copy.copy_redis, list[str]()

    def copy_while_finishing(url: str, directory: Path, on_begin: Callable[[], None]) -> Any:
        def begin() -> None:
            if not finished:
                trainer.checkpoint()  # Redis has forked, and the two looks after it come now
                finished.append("once")
            on_begin()

        return copy(url, directory, begin)

    monkeypatch.setattr(backups, "copy_redis", copy_while_finishing)
    monkeypatch.setattr("weir.backup.point.LOOK_EVERY_S", 3600.0)  # only the looks before and after the copy
    said: list[str] = []
    manifest = back_up(run.plan(), tmp_path / "backup", said.append)
    assert said[0] == (
        "the trainer finished a checkpoint just when Redis copied its data; it is copied again"
    )
    assert manifest.step == 2
    elsewhere = place("elsewhere")
    restore_to(elsewhere, tmp_path / "backup")
    continued(elsewhere, answers)


def test_backups_under_load_are_all_consistent(
    run: Place, place: Callable[[str], Place], tmp_path: Path
) -> None:
    """Agents and the trainer go on while three backups are made."""
    over, copying, told = threading.Event(), threading.Event(), list[str]()

    def agents() -> None:
        with redis_at(run.redis.url) as redis:
            while not over.is_set():
                answer(redis, f"s{len(told)}")
                told.append(f"s{len(told)}")

    def train() -> None:
        with redis_at(run.redis.url) as redis:
            trainer = SmallTrainer(redis, run.checkpoints)
            while not over.is_set():
                for _ in range(20):
                    trainer.train()
                trainer.checkpoint()
                seen = looks(redis)
                over.wait(0.3)  # so long a checkpoint of the smallest model is current
                while copying.is_set() and (now := looks(redis)) < seen + 20:  # longer on a busy machine
                    seen = min(seen, now)  # the next attempt counts from 0
                    over.wait(0.01)

    def looks(redis: Redis) -> int:
        mark: Any = redis.get(MARK) or b"mark-0-"
        return int(mark.split(b"-")[1])

    def say(sentence: str) -> None:
        if sentence.startswith("Redis:"):  # its data were copied
            copying.clear()

    heard: list[int] = []
    with meanwhile(over, agents, train):
        for number in range(3):
            heard.append(len(told))
            copying.set()
            back_up(run.plan(), tmp_path / f"backup{number}", say)
    elsewhere = place("elsewhere")
    for number in range(3):
        restore_to(elsewhere, tmp_path / f"backup{number}", replace=number > 0)
        continued(elsewhere, told[: heard[number]])
        elsewhere.client.delete(key_names.LEASE)
    assert not list(run.checkpoints.glob(".backup*")), "held files were left"


def test_what_belongs_to_the_former_place_is_changed_or_left_out(
    run: Place, place: Callable[[str], Place], tmp_path: Path
) -> None:
    for version in (1, 2, 3, 4):
        run.publish(version)
    plan = ServingPlan(admissible=(Admissible(3, 1), Admissible(2, 1)))
    run.client.set(key_names.SERVING, msgspec.json.encode(plan))
    for name in (
        key_names.SERVERS,
        key_names.TRAINER,
        key_names.LEASE,
        key_names.PUSH_LEASE,
        key_names.SECRET,
    ):
        run.client.hset(name, "a", "b")
    run.client.zadd(key_names.DEADLINES, {"s1": time.time() + 60})
    manifest = back_up_to(tmp_path / "backup", run)
    assert manifest.policies == (2, 3, 4)
    text = (tmp_path / "backup" / "backup.json").read_text()
    aged = msgspec.structs.replace(manifest, taken_at=manifest.taken_at - 5000)
    (tmp_path / "backup" / "backup.json").write_bytes(msgspec.json.encode(aged))
    elsewhere = place("elsewhere")
    restore_to(elsewhere, tmp_path / "backup")
    left: Any = elsewhere.client.keys("weir:*")
    kept = (key_names.POLICIES, key_names.SERVING, key_names.SECRET, key_names.DEADLINES, key_names.SCHEMA)
    assert set(left) == {name.encode() for name in kept}
    packed: Any = elsewhere.client.hget(key_names.POLICIES, "4")
    location = msgspec.json.decode(packed, type=PolicyRecord).location
    assert location == (elsewhere.policies / "v00000004").resolve().as_uri()
    versions = {path.name for path in elsewhere.policies.iterdir()}
    assert versions == {"v00000002", "v00000003", "v00000004"}
    assert (elsewhere.policies / "v00000004" / STABLE).exists()
    expires_at: Any = elsewhere.client.zscore(key_names.DEADLINES, "s1")
    assert expires_at > time.time() + 4000
    assert json.loads(text)["taken_at"] == manifest.taken_at
    assert back_up_to(tmp_path / "all", run, every_version=True).policies == (1, 2, 3, 4)


def test_a_broken_backup_is_refused_by_name_and_changes_nothing(
    trained: Place, place: Callable[[str], Place], tmp_path: Path
) -> None:
    trained.publish(1)
    directory, elsewhere = tmp_path / "backup", place("elsewhere")
    back_up_to(directory, trained)
    for path in [directory, *directory.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, f"others than its owner may read {path}"

    def refused(match: str) -> None:
        with pytest.raises(BackupBroken, match=match):
            restore_to(elsewhere, directory)
        assert elsewhere.client.dbsize() == 0
        assert not elsewhere.checkpoints.exists()
        assert not elsewhere.policies.exists()

    weights = directory / "checkpoints" / "00000001-step-00000001" / "weights.bin"
    content = weights.read_bytes()
    weights.write_bytes(b"v" + content[1:])
    refused("weights.bin is damaged")
    weights.write_bytes(content[:-1])
    refused("has 999 bytes, and not 1000")
    weights.unlink()
    refused("weights.bin is missing")
    weights.write_bytes(content)
    manifest = (directory / "backup.json").read_text()
    (directory / "backup.json").write_text(manifest.replace('"format": 1', '"format": 2'))
    refused("has format 2, and this release reads 1")
    (directory / "backup.json").write_text(manifest.replace('"redis.index"', '"../redis.index"'))
    refused("which is not in the backup")
    (directory / "backup.json").write_text(manifest[:-20])
    refused("backup.json cannot be read")
    (directory / "backup.json").unlink()
    refused("has no backup.json: it is no backup, or one that was not finished")
    (directory / "backup.json").write_text(manifest)
    restore_to(elsewhere, directory)


def test_a_target_that_is_in_use_is_refused(
    trained: Place, place: Callable[[str], Place], tmp_path: Path
) -> None:
    backup, elsewhere = tmp_path / "backup", place("elsewhere")
    back_up_to(backup, trained)
    with pytest.raises(StackError, match="a trainer runs on this Redis"):
        restore_to(trained, backup, replace=True)
    trained.client.delete(key_names.LEASE)
    with pytest.raises(StackError, match="this Redis has data of Weir"):
        restore_to(trained, backup)
    (elsewhere.checkpoints / "00000009-step-00000009").mkdir(parents=True)
    with pytest.raises(StackError, match="00000009-step-00000009 is there"):
        restore_to(elsewhere, backup)
    restore_to(elsewhere, backup, replace=True)
    assert [path.name for path in elsewhere.checkpoints.glob("*-step-*")] == ["00000001-step-00000001"]


def test_a_backup_that_fails_leaves_nothing(run: Place, tmp_path: Path) -> None:
    plan = BackupPlan(
        sources=Sources(run.redis.url, NOBODY), checkpoint_dir=tmp_path / "nowhere", policies_dir=None
    )
    with pytest.raises(StackError, match="nowhere is not here: run this where the trainer's checkpoints are"):
        back_up(plan, tmp_path / "backup", lambda _: None)
    run.redis.kill()
    with pytest.raises(StackError, match="Redis at redis://"):
        back_up_to(tmp_path / "backup", run)
    assert not (tmp_path / "backup").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(StackError, match="full is not empty"):
        back_up_to(tmp_path / "full", run)
    assert (tmp_path / "full" / "file").exists()


def test_the_commands_start_the_redis_of_a_run_that_is_not_up(
    trained: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ["--checkpoint-dir", str(trained.checkpoints), "--policies-dir", str(trained.policies)]
    where += ["--redis-url", trained.redis.url, "--fresh"]
    made = CliRunner().invoke(app, ["backup", str(tmp_path / "b"), *where])
    assert made.exit_code == 0, made.output
    assert "the trainer wrote no checkpoint" in made.output
    assert "checkpoint 00000001-step-00000001: step 1, version 1" in made.output
    port = free_port()
    monkeypatch.setenv("WEIR_STACK__REDIS_PORT", str(port))
    written = CliRunner().invoke(app, ["restore", str(tmp_path / "b"), "--run-dir", str(tmp_path / "new")])
    assert written.exit_code == 0, written.output
    assert "start the services, and run `weir audit`" in written.output
    assert (tmp_path / "new" / "checkpoints" / "CURRENT").read_text() == "00000001-step-00000001"
    again = RedisProcess(tmp_path / "new" / "redis").start()
    assert again.client.exists(key_names.session("s1"))
    assert again.client.get(key_names.SCHEMA) == b"1"
    again.close()
