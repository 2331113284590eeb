"""The configuration of each service, and the configuration by which Redis keeps the queue's promises."""

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from redis.exceptions import AuthenticationError

from rollout_queue.config_file import MalformedSettings
from rollout_queue.machine_memory import MachineMemory
from tests.support.redis_clients import redis_at
from tests.support.serving import free_port
from weir.errors import StackError
from weir.stack import preflight
from weir.stack.preflight import check_machine, check_memory
from weir.stack.run_keys import with_keys
from weir.stack.service_process import START, redis_service
from weir.stack.services import services_of
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # no tensors
    return tmp_path / "model"


@pytest.mark.parametrize("password", [None, 'a "b" \\c: @d/%é'])
def test_redis_keeps_what_the_queue_promises(settings: StackSettings, password: str | None) -> None:
    given = settings.model_copy(update={"redis_port": free_port(), "redis_password": password})
    mine = with_keys(given)
    # As the supervisor reads them.
    mine = StackSettings.model_validate_json(mine.model_dump_json())
    with Stack(mine, [redis_service(mine)]) as stack:
        stack.wait_ready()
        with redis_at(stack.redis_url, decode_responses=True) as client:
            for name, value in {
                "appendonly": "yes",
                "appendfsync": "always",
                "maxmemory-policy": "noeviction",
                "save": "",
                "dir": str(settings.run_dir / "redis"),
            }.items():
                assert client.config_get(name) == {name: value}
            machine = psutil.virtual_memory().total
            assert 0 < int(client.config_get("maxmemory")["maxmemory"]) <= machine * 2 // 3
            assert client.config_get("bind")["bind"].startswith("127.0.0.1")
            client.set("kept", "yes")
            client.xgroup_create("stream", "readers", mkstream=True)
            for what in (
                ">",
                "0",
            ):  # as the trainer reads at its start: in a transaction, and nothing is there
                pipeline = client.pipeline(transaction=True)
                pipeline.xreadgroup("readers", "one", {"stream": what})
                pipeline.execute()
            release = int(client.info("server")["redis_version"].partition(".")[0])
        with pytest.raises(AuthenticationError):
            redis_at(f"redis://127.0.0.1:{mine.redis_port}/0").ping()
        process = psutil.Process(stack.processes["redis"].pid)
        assert str(mine.redis_password) not in " ".join(process.cmdline()), "every user reads this"
        for path in (mine.run_dir, *mine.run_dir.rglob("*")):
            reached = stat.S_IMODE(path.stat().st_mode) & 0o077
            assert not (path.is_file() and reached), f"others read {path}"
        assert stat.S_IMODE(mine.run_dir.stat().st_mode) == 0o700
    with Stack(mine, [redis_service(mine)]) as stack:
        stack.wait_ready()
        with redis_at(stack.redis_url, decode_responses=True) as client:
            assert client.get("kept") == "yes"
    said = (mine.logs_dir / "redis.log").read_text()
    assert "DB loaded from append only file" in said
    if release > 6:  # Redis 6.2 notes an end of a transaction without its beginning, and ignores it later
        assert "CRITICAL" not in said


@pytest.mark.parametrize(
    ("limits", "variables", "sentence"),
    [
        ({}, {}, "1073741824: a quarter of this machine's 4096 MiB"),
        ({"memory.max": "max"}, {}, "1073741824: a quarter of this machine's 4096 MiB"),
        ({"memory.max": "3221225472"}, {}, "2147483648: two thirds of the 3072 MiB"),
        ({"memory/memory.limit_in_bytes": "3221225472"}, {}, "2147483648: two thirds of the 3072 MiB"),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, {}, "1073741824: a quarter"),
        ({"memory.max": "3221225472"}, {"WEIR_REDIS_MEMORY": "5gb"}, "5gb: set by WEIR_REDIS_MEMORY"),
    ],
)
def test_redis_has_a_bound_from_its_container_or_machine(
    tmp_path: Path, limits: dict[str, str], variables: dict[str, str], sentence: str
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:        4194304 kB\nMemFree:          1000 kB\n")
    for name, limit in limits.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    environment = {"WEIR_MEMINFO": str(tmp_path / "meminfo"), "WEIR_CGROUPS": str(tmp_path / "groups")}
    command = ["/bin/sh", str(START), "echo", "redis-server"]
    said = subprocess.check_output(command, env=os.environ | environment | variables, text=True).splitlines()
    assert sentence in said[0]
    assert said[1] == f"redis-server --maxmemory {said[0].split()[3].rstrip(':')}"


def test_every_service_reads_one_file_that_the_stack_wrote(
    settings: StackSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_path: Path
) -> None:
    file = tmp_path / "weir.yaml"
    file.write_text(
        "gateway: {strict_models: true, port: 1}\ntrainer: {algorithm: {min_live_rows: 4, max_rows: 8}}\n"
    )
    monkeypatch.setenv("WEIR_CONFIG", str(file))
    monkeypatch.setenv("WEIR_GATEWAY__PORT", "2")
    monkeypatch.setenv("WEIR_REDIS_URL", "redis://elsewhere/0")
    monkeypatch.setenv("WEIR_TRAINER__SEED", "7")
    mine = StackSettings(
        run_dir=settings.run_dir,
        model_path=model_path,
        gateway_port=3,
        services={"trainer": {"algorithm": {"max_rows": 16}}},
        admin_keys=["a1", "a2"],
    )
    redis, rollout, gateway, trainer = services_of(mine)
    assert stat.S_IMODE((mine.run_dir / "weir.yaml").stat().st_mode) == 0o600, "for its owner alone"
    document = yaml.safe_load((mine.run_dir / "weir.yaml").read_text())
    assert document["gateway"] == {
        "strict_models": True,
        "port": 3,
        "redis_url": mine.redis_url,
        "model_path": str(model_path),
    }
    assert document["trainer"]["algorithm"] == {"min_live_rows": 4, "max_rows": 16}
    assert document["rollout_server"]["policies_dir"] == document["trainer"]["policies_dir"]
    assert "WEIR_GATEWAY__PORT" not in gateway.environment
    assert "WEIR_REDIS_URL" not in gateway.environment
    assert trainer.environment["WEIR_TRAINER__SEED"] == "7"
    assert trainer.environment["WEIR_ADMIN_KEYS"] == "a1,a2"
    assert rollout.environment["WEIR_CONFIG"] == str(mine.run_dir / "weir.yaml")
    assert sorted([*redis.ports, *rollout.ports, *gateway.ports, *trainer.ports]) == [
        3,
        6379,
        8100,
        8200,
        30000,
    ]


RULES = "[{name: sums, kind: http, url: 'http://127.0.0.1:9/grade'}]"


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, section: str, variable: str) -> Path:
    """The directory of a run whose file has this section; the variable is for the rules of rewards."""
    (tmp_path / "weir.yaml").write_text(section)
    monkeypatch.setenv("WEIR_CONFIG", str(tmp_path / "weir.yaml"))
    if variable:
        monkeypatch.setenv("WEIR_REWARDS__RULES", variable)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("section", "variable", "starts"),
    [
        ("", "", False),
        ("rewards: {port: 4}", "", False),
        ("rewards: {rules: []}", "", False),
        (f"rewards: {{rules: {RULES}}}", "", True),
        (f"rewards: {{rules: {RULES}}}", "[]", False),
        ("", '[{"name": "sums", "kind": "http", "url": "http://127.0.0.1:9/grade"}]', True),
    ],
)
def test_the_reward_service_is_started_if_it_has_rules(configured: Path, starts: bool) -> None:
    names = [service.name for service in services_of(StackSettings(run_dir=configured))]
    ours = ["redis", "rollout_server", "gateway", "trainer_service"]
    assert names == ([*ours, "reward_service"] if starts else ours)


@pytest.mark.parametrize(
    ("section", "variable", "why"),
    [
        ("rewards: {rules: 3}", "", r"rewards\.rules: Input should be a valid list"),
        ("rewards: {rules: [{kind: poem}]}", "", r"rewards\.rules\.0: Input tag 'poem'"),
        ("rewards: {rules: [{name: a, kind: http}]}", "", r"rewards\.rules\.0\.http\.url"),
        ("", "[{", 'rewards: .*"rules".*'),
        ("rewards: [{kind: poem}]", "", "the section 'rewards' has no fields"),
        ("[rewards]", "", "has no sections"),
        ("rewards: {rules: [", "", "cannot be read"),
    ],
)
def test_malformed_rules_are_told_in_a_sentence_before_anything_starts(configured: Path, why: str) -> None:
    with pytest.raises((StackError, MalformedSettings), match=why) as told:
        services_of(StackSettings(run_dir=configured))
    assert len(str(told.value).splitlines()) <= 5


def test_the_reward_service_rewards_at_the_gateway_of_this_stack(
    settings: StackSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_REWARDS__PORT", "8399")
    monkeypatch.setenv("WEIR_GATEWAY_URL", "http://elsewhere")
    rules = yaml.safe_load(RULES)
    mine = StackSettings(
        run_dir=settings.run_dir, gateway_port=3, admin_keys=["a1"], services={"rewards": {"rules": rules}}
    )
    rewards = services_of(mine)[-1]
    document = yaml.safe_load((mine.run_dir / "weir.yaml").read_text())
    assert document["rewards"] == {"port": 8399, "gateway_url": "http://127.0.0.1:3", "rules": rules}
    assert rewards.ports == {8399: "rewards.port (WEIR_REWARDS__PORT)"}
    assert "WEIR_GATEWAY_URL" not in rewards.environment
    assert rewards.environment["WEIR_ADMIN_KEYS"] == "a1"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_path": None}, "no model is set: set WEIR_MODEL_PATH"),
        ({"model_path": "elsewhere"}, "elsewhere is not a Hugging Face directory"),
        ({"engine_python": "elsewhere/python"}, "run `make install`"),
        ({"free_disk_bytes": 2**60}, "GiB left, and a run needs"),
        ({"free_memory_bytes": 2**60}, r"of free memory, and .* needs about 1152921504\.6 GB"),
    ],
)
def test_what_the_machine_lacks_is_one_sentence(
    settings: StackSettings, model_path: Path, change: dict[str, Any], sentence: str
) -> None:
    complete: dict[str, Any] = {
        "run_dir": settings.run_dir,
        "model_path": model_path,
        "engine_python": os.path.realpath("/bin/sh"),
    }
    check_machine(StackSettings(**complete))
    with pytest.raises(StackError, match=sentence):
        check_machine(StackSettings(**{**complete, **change}))


@pytest.mark.parametrize(
    ("services", "variables", "free_gb", "sentence"),
    [
        # 135 million parameters, each 43 bytes of the trainer and 4 of the engine; 3 % of the free
        # memory for keys and values; 2.5 GB for the rest
        ({}, {}, 10.0, ""),
        (
            {},
            {},
            8.5,
            "has 8.5 GB of free memory, and .* needs about 9.2 GB: set trainer.lora to {} to train "
            "adapters, with about 5.0 GB, take a smaller model, or set stack.free_memory_bytes to 0",
        ),
        ({"trainer": {"lora": {}}}, {}, 6.0, ""),
        ({}, {"WEIR_TRAINER__LORA__RANK": "8"}, 6.0, ""),
        ({"trainer": {"lora": {}}}, {}, 4.5, "needs about 5.0 GB: take a smaller model"),
        (
            {},
            {"WEIR_ROLLOUT_SERVER__MAX_TOTAL_TOKENS": "65536"},
            10.0,
            "lower rollout_server.max_total_tokens, whose cache is 3.0 GB of it",
        ),
        ({"rollout_server": {"engine_device": "cuda"}}, {}, 0.1, ""),
    ],
)
def test_a_model_that_does_not_fit_into_the_memory_is_refused_at_the_start(
    settings: StackSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    services: dict[str, Any],
    variables: dict[str, str],
    free_gb: float,
    sentence: str,
) -> None:
    shape = {"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    tensor = {"dtype": "F32", "shape": [135, 1_000_000], "data_offsets": [0, 540_000_000]}
    head = json.dumps({"w": tensor}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + 540_000_000)  # a hole, which takes no space
    free = int(free_gb * 1e9)
    monkeypatch.setattr(preflight, "machine_memory", lambda: MachineMemory(free, free))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    mine = settings.model_copy(update={"model_path": tmp_path, "services": services})
    if not sentence:
        check_memory(mine)
        return
    with pytest.raises(StackError, match=sentence):
        check_memory(mine)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", b"version https://git-lfs", r"config\.json: cannot be read"),
        ("config.json", b"[]", r"config\.json: is not a JSON object"),
        ("model.safetensors", b"version https://git-lfs", r"model\.safetensors: is a pointer of Git LFS"),
        ("model.safetensors", b"", r"model\.safetensors: is truncated"),
        ("model-00002-of-00003.safetensors", b"", r"model-00001-of-00003\.safetensors: is missing"),
    ],
)
def test_a_model_whose_files_cannot_be_read_is_refused_before_anything_starts(
    settings: StackSettings, model_path: Path, name: str, content: bytes, sentence: str
) -> None:
    mine = settings.model_copy(update={"model_path": model_path})
    check_memory(mine)
    if name.startswith("model-"):
        (model_path / "model.safetensors").unlink()
    (model_path / name).write_bytes(content)
    with pytest.raises(StackError, match=sentence):
        check_memory(mine)
