"""`weir doctor` on a real Redis without a gateway, and on facts that no test can bring about."""

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.exceptions import ResponseError

from rollout_queue.contract.published_policy import FileSpec, Manifest, PolicyRecord
from rollout_queue.machine_memory import MachineMemory, machine_memory
from rollout_queue.protocol.trainer_messages import TrainerReport
from rollout_queue.redis import key_names
from rollout_queue.redis.settings import RedisSettings
from tests.support.redis_process import RedisProcess
from tests.support.serving import NOBODY, free_port
from tests.support.waiting import PATIENCE_S, wait_until
from weir.doctor.deployment_facts import DeploymentFacts, DiskFacts, MachineFacts, RedisFacts, ServiceFacts
from weir.doctor.doctor import examine, examined
from weir.doctor.targets import Targets
from weir.stack.service_process import redis_ready
from weir.stack.stack_state import ProcessState, StackState


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path / "redis").start(maxmemory="64mb")
    yield process
    process.close()


def told(redis: RedisProcess, **targets: Any) -> dict[str, str]:
    """The problems, except that no gateway answers."""
    given: dict[str, Any] = {"gateway_url": NOBODY, "redis_url": redis.url, "patience_s": PATIENCE_S}
    found = examine(Targets(**given | targets)).problems
    left = {"service_silent", "trainer_missing", "memory_short", "redis_lacks_fixes"}
    return {each.check: each.sentence for each in found if each.check not in left}


def test_redis_with_the_queues_configuration_has_no_problem(redis: RedisProcess) -> None:
    assert told(redis) == {}


@pytest.mark.parametrize(
    ("name", "value", "check", "sentence"),
    [
        ("appendonly", "no", "redis_loses_data", "writes no append-only file"),
        ("appendfsync", "everysec", "redis_syncs_late", "up to two seconds of answers"),
        ("appendfsync", "no", "redis_syncs_late", "half a minute of answers"),
        ("maxmemory-policy", "allkeys-lru", "redis_evicts", "its maxmemory-policy is allkeys-lru"),
        ("maxmemory", "0", "redis_unbounded", "has no maxmemory"),
    ],
)
def test_a_setting_that_breaks_a_promise_is_found(
    redis: RedisProcess, name: str, value: str, check: str, sentence: str
) -> None:
    redis.client.config_set(name, value)
    found = told(redis)
    assert list(found) == [check]
    assert sentence in found[check]


def test_redis_that_is_away_is_found(redis: RedisProcess) -> None:
    redis.kill()
    assert f"Redis at {redis.url} does not answer: " in told(redis)["redis_silent"]


@pytest.mark.parametrize(
    ("given", "says"),
    [("", "asks for a password, and none was given"), (":wrong@", "refuses the user or the password")],
)
def test_redis_that_refuses_the_password_is_not_called_silent(
    redis: RedisProcess, given: str, says: str
) -> None:
    redis.client.config_set("requirepass", "hush")
    redis.client.config_set("maxmemory", 0)
    found = told(redis, redis_url=redis.url.replace("//", f"//{given}"))
    assert list(found) == ["redis_refuses"]
    assert says in found["redis_refuses"]
    assert "HELLO" not in found["redis_refuses"]
    assert (
        redis_ready(RedisSettings(redis_url=redis.url.replace("//", f"//{given}")))()
        == found["redis_refuses"].partition(" in: ")[2]
    )


def test_a_password_is_not_shown(redis: RedisProcess) -> None:
    found = told(redis, redis_url=f"redis://:hush@127.0.0.1:{free_port()}/0")
    assert "hush" not in found["redis_silent"]


def test_redis_that_is_nearly_full_or_has_evicted_is_found(redis: RedisProcess) -> None:
    redis.client.setrange("ballast", 10 * 2**20, b"x")
    used: Any = redis.client.info("memory")
    redis.client.config_set("maxmemory", str(int(used["used_memory"] * 1.05)))
    assert "% of its maxmemory" in told(redis)["redis_nearly_full"]
    redis.client.config_set("maxmemory", str(int(used["used_memory"] * 0.9)))
    assert "is full" in told(redis)["redis_full"]
    assert "refuses every write" in told(redis)["redis_full"]
    redis.client.config_set("maxmemory-policy", "allkeys-lru")
    redis.client.config_set("maxmemory", str(used["used_memory"] + 1_000_000))
    for number in range(200):
        redis.client.set(f"k{number}", b"x" * 10_000)
    assert "since it started" in told(redis)["redis_has_evicted"]


def test_redis_that_cannot_rewrite_its_file_is_found(redis: RedisProcess, tmp_path: Path) -> None:
    redis.client.set("k", "v")
    shutil.rmtree(tmp_path / "redis")
    with suppress(ResponseError):  # from Valkey 9 on, the command itself tells it
        redis.client.bgrewriteaof()

    def failed() -> bool:
        return "could not rewrite its append-only file" in told(redis).get("redis_cannot_write", "")

    wait_until(failed)


def test_a_replica_is_found(redis: RedisProcess) -> None:
    redis.client.replicaof("127.0.0.1", free_port())
    assert told(redis)["redis_is_replica"] == f"{redis.url} is a replica, which takes no writes"


def test_redis_that_others_reach_without_a_password_is_found(redis: RedisProcess) -> None:
    redis.client.config_set("bind", "127.0.0.1 127.0.0.2")
    redis.client.config_set("protected-mode", "no")
    assert "127.0.0.2 without a password" in told(redis)["redis_is_open"]


def test_redis_that_hides_its_configuration_is_found(redis: RedisProcess) -> None:
    """INFO tells most of it."""
    redis.client.config_set("maxmemory-policy", "volatile-ttl")
    redis.client.acl_setuser("default", commands=["-config"], enabled=True)
    found = told(redis)
    assert list(found) == ["redis_evicts", "redis_hides_configuration"]
    assert "volatile-ttl" in found["redis_evicts"]
    assert "persistence" not in found["redis_hides_configuration"]


def test_a_trainer_that_is_silent_or_paused_is_told_without_a_gateway(redis: RedisProcess) -> None:
    def sentences() -> dict[str, str]:
        found = examine(Targets(gateway_url=NOBODY, redis_url=redis.url, patience_s=PATIENCE_S)).problems
        return {each.check: each.sentence for each in found}

    assert sentences()["trainer_missing"] == "no trainer has reported yet"
    report = TrainerReport(state="paused", waiting_for="POST /resume", last_seen=time.time() - 90)
    redis.client.hset(key_names.TRAINER, mapping=report.fields())  # type: ignore[arg-type]
    redis.client.xadd(key_names.DEAD_LETTERS, {"error": "unknown"})
    found = sentences()
    assert "has been silent for 9" in found["trainer_silent"]
    assert "waited for POST /resume" in found["trainer_silent"]
    assert found["dead_letters"].startswith("the trainer could not read 1 record,")
    redis.client.hset(key_names.TRAINER, "last_seen", str(time.time()))
    assert sentences()["trainer_paused"] == "the trainer is paused and waits for POST /resume"


def test_a_training_that_stands_still_or_trains_little_is_found(redis: RedisProcess) -> None:
    redis.client.xadd(key_names.STREAM, {key_names.STREAM_FIELD: b""})
    redis.client.zadd(key_names.SETTLED, {"s1": (time.time() - 7200) * 1000})
    record = PolicyRecord(version=3, created_at=time.time() - 8 * 3600)
    redis.client.hset(key_names.POLICIES, "3", msgspec.json.encode(record))
    redis.client.hset(
        key_names.VERDICTS, mapping={"session:stale": 80, "session:trained": 20, "turn:stale": 99}
    )
    found = told(redis)
    assert "1 record waits" in found["no_verdict_for_long"]
    assert "no version was published for 8 h" in found["no_version_for_long"]
    assert found["mostly_untrained"] == "80% of 100 sessions were not trained, 80 of them stale"


def test_paths_models_and_disks_that_do_not_fit_are_found(redis: RedisProcess, tmp_path: Path) -> None:
    for name, text in (("a", "{}"), ("b", '{"other": true}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    record = PolicyRecord(version=1, created_at=time.time())
    redis.client.hset(key_names.POLICIES, mapping={"0": b"{}", "1": msgspec.json.encode(record)})
    settings = {
        "gateway": {"model_path": str(tmp_path / "a")},
        "trainer": {"model_path": str(tmp_path / "b"), "policies_dir": str(tmp_path / "a")},
        "rollout_server": {"policies_dir": str(tmp_path / "nowhere")},
    }
    found = told(redis, settings=settings)
    assert found["models_differ"].startswith("config.json differs between gateway.model_path, trainer.model_")
    assert "rollout servers accept only those in" in found["policies_not_shared"]
    assert "is not there" in found["policies_out_of_sight"]
    settings["trainer"]["publish_url"] = "http://127.0.0.1:8200/weights"
    assert not {"policies_not_shared", "policies_out_of_sight"} & set(told(redis, settings=settings))


def test_recent_errors_in_logs_and_ended_processes_are_found(redis: RedisProcess, tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    (logs / "trainer_service.log").write_text(
        f"{now},1 ERROR trainer: the disk is full\n{now},1 INFO it goes on\n"
    )
    (logs / "gateway.log").write_text("2020-01-01 00:00:00,1 ERROR gateway: long ago\n")
    gone = ProcessState(pid=1, started_at=1.0)
    stack = StackState(
        parent=gone, services={"redis": gone, "gateway": ProcessState.of(redis.process.pid, restarts=3)}
    )
    found = examine(
        Targets(
            gateway_url=NOBODY,
            redis_url=redis.url,
            run_dir=tmp_path / "run",
            stack=stack,
            patience_s=PATIENCE_S,
        )
    ).problems
    told = [each.sentence for each in found if each.check in ("log_has_error", "process_ended")]
    assert told == [
        "the process of redis has ended",
        "the process that restarts services has ended",
        f"the last error of trainer_service: {now},1 ERROR trainer: the disk is full",
        "gateway was restarted 3 times",
    ]


@pytest.mark.parametrize(
    ("service", "line"),
    [
        ("engine", "[{now}] The server is fired up and ready to roll!"),
        ("redis", "5:M 29 Nov 2026 06:21:23.915 * Ready to accept connections tcp"),
        ("gateway", "{now},1 INFO uvicorn.error: Application startup complete."),
        (
            "gateway",
            "{now},1 INFO rollout_queue.http.probe_routes: ready again: it was not, because Redis failed",
        ),
        ("rollout_server", "{now},1 INFO rollout_server.engine.engine: engine serves version 3 after 2.0 s"),
        ("trainer_service", "{now},1 INFO trainer_service: listens on 127.0.0.1:8200"),
    ],
)
def test_an_error_before_a_service_was_ready_is_over(
    redis: RedisProcess, tmp_path: Path, service: str, line: str
) -> None:
    log = tmp_path / "logs" / f"{service}.log"
    log.parent.mkdir()
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    error = f"{now},1 ERROR it: went wrong\nrequests.exceptions.HTTPError: 401\n"

    def found() -> list[str]:
        targets = Targets(gateway_url=NOBODY, redis_url=redis.url, run_dir=tmp_path, patience_s=PATIENCE_S)
        return [each.sentence for each in examine(targets).problems if each.check == "log_has_error"]

    log.write_text(error)
    assert len(found()) == 1
    log.write_text(error + line.format(now=now) + "\n")
    assert found() == []
    log.write_text(error + line.format(now=now) + "\n" + error)
    assert len(found()) == 1


HEALTHY = DeploymentFacts(
    gateway=ServiceFacts(kind="gateway", name="gateway", url="http://gateway"),
    redis=RedisFacts(address="redis://127.0.0.1", config={}, trainer=TrainerReport(last_seen=1.0)),
    now=1.0,
)


def of(facts: DeploymentFacts) -> dict[str, str]:
    return {each.check: each.sentence for each in examined(facts).problems}


@pytest.mark.parametrize(
    ("info", "check", "sentence"),
    [
        ({"maxmemory": 1, "loading": 1}, "redis_starts", "is reading its file"),
        ({"maxmemory": 1, "redis_version": "5.0.14"}, "redis_is_old", "Redis 5.0.14 lacks commands"),
        ({"maxmemory": 1, "aof_current_rewrite_time_sec": 1300}, "redis_rewrites_slowly", "for 22 min"),
        (
            {"maxmemory": 1, "aof_last_write_status": "err"},
            "redis_cannot_write",
            "could not write its append",
        ),
    ],
)
def test_what_redis_says_of_itself(info: dict[str, Any], check: str, sentence: str) -> None:
    assert of(HEALTHY) == {}
    found = of(replace(HEALTHY, redis=replace(HEALTHY.redis, info=info)))
    assert list(found) == [check]
    assert sentence in found[check]


@pytest.mark.parametrize(
    ("redis", "valkey", "sentence"),
    [
        ("6.2.14", None, "Redis 6.2.14 lacks the security fixes of 6.2.24"),
        ("7.0.15", None, "Redis 7.0.15 gets no security fixes any more"),
        ("8.10.1", None, "Redis 8.10.1 lacks the security fixes of 8.10.2"),
        ("7.2.4", "8.1.8", "Valkey 8.1.8 lacks the security fixes of 8.1.9"),
        ("6.2.24", None, None),
        ("7.4.12", None, None),
        ("9.0.0", None, None),
        ("7.2.4", "9.1.2", None),
    ],
)
def test_a_server_older_than_the_last_security_fix_of_its_line_is_found(
    redis: str, valkey: str | None, sentence: str | None
) -> None:
    info = {"maxmemory": 1, "redis_version": redis} | ({} if valkey is None else {"valkey_version": valkey})
    found = of(replace(HEALTHY, redis=replace(HEALTHY.redis, info=info)))
    assert found == ({} if sentence is None else {"redis_lacks_fixes": sentence})


def test_room_on_disk_and_in_memory() -> None:
    gib = 2**30
    disk = DiskFacts(setting="trainer.checkpoint_dir", path="/c", exists=True, free_bytes=5 * gib)
    assert of(replace(HEALTHY, machine=MachineFacts(disks=(disk,)))) == {}
    large = replace(disk, largest_part_bytes=3 * gib, parts=2)
    found = of(replace(HEALTHY, machine=MachineFacts(disks=(large,))))
    assert found["disk_short"].endswith(
        "has 5.0 GiB left, and should have 6.0 GiB: room for 2 more of 3.0 GiB"
    )
    info = {"maxmemory": 7 * gib, "used_memory": 1}
    machine = MachineFacts(memory_bytes=8 * gib, memory_free_bytes=gib // 8)
    found = of(replace(HEALTHY, redis=replace(HEALTHY.redis, info=info), machine=machine))
    assert found["memory_short"].startswith("128.0 MiB of 8.0 GiB of memory are left")
    assert found["redis_larger_than_memory"].startswith("Redis may use 7.0 GiB, and this machine has 8.0 GiB")


def test_a_disk_that_hangs_is_said_and_not_waited_for() -> None:
    machine = MachineFacts(failed="its disks did not answer within 8 s")
    assert "disks did not answer" in of(replace(HEALTHY, machine=machine))["not_examined"]


def test_the_published_model_is_compared_with_the_gateways() -> None:
    manifest = Manifest(version=4, step=4, files=[FileSpec("tokenizer.json", 1, "a")])
    machine = MachineFacts(models={"gateway": {"tokenizer.json": "b"}})
    found = of(replace(HEALTHY, manifest=manifest, machine=machine))
    assert found["models_differ"].startswith("tokenizer.json differs between gateway.model_path, published")


def test_the_memory_limit_of_a_container_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 3 kB\nMemFree: 0 kB\nMemAvailable: 2 kB\n")
    assert machine_memory(meminfo, tmp_path) == MachineMemory(3072, 2048)
    for name, text in (("max", "1000\n"), ("current", "700\n"), ("stat", "anon 1\ninactive_file 300\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert machine_memory(meminfo, tmp_path) == MachineMemory(1000, 600)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_memory(meminfo, tmp_path) == MachineMemory(3072, 2048)
    everything = machine_memory(tmp_path / "missing", tmp_path)
    assert everything.total == everything.free > 0, "a system that does not say what is free"
