"""Checks SGLang's command line and environment on each device, and the settings that they come from."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollout_server.engine.command import SHIM, cpu_kv_tokens, engine_command, engine_environment
from rollout_server.registration import addresses
from rollout_server.settings import RolloutServerSettings

KV = 1234


def settings(**fields: Any) -> RolloutServerSettings:
    return RolloutServerSettings(model_path=Path("/models/m"), **fields)


def options(command: list[str]) -> dict[str, str | None]:
    following = [*command[1:], "--"]
    return {
        word: None if after.startswith("--") else after
        for word, after in zip(command, following, strict=True)
        if word.startswith("--")
    }


def test_the_cpu_engine_uses_torch_native_attention_and_float32() -> None:
    given = options(engine_command(settings(engine_python="/e/python"), "cpu", Path("/w/v7"), 7, KV))
    assert given["--model-path"] == "/w/v7"
    assert given["--weight-version"] == "7"
    assert (given["--device"], given["--attention-backend"]) == ("cpu", "torch_native")
    assert given["--dtype"] == "float32"
    assert given["--host"] == "127.0.0.1"
    assert {"--incremental-streaming-output", "--sleep-on-idle", "--skip-server-warmup"} <= given.keys()


@pytest.mark.parametrize(
    ("config", "dtype", "free_gb", "tokens"),
    [
        # 2 · layers · key-value heads · width · bytes: 46,080 B a token of SmolLM2-135M
        ({"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}, None, 20, 13_020),
        ({"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}, "bfloat16", 20, 26_041),
        ({"num_hidden_layers": 30, "num_attention_heads": 9, "hidden_size": 576}, None, 50, 10_850),
        (
            {"text_config": {"num_hidden_layers": 28, "num_key_value_heads": 8, "head_dim": 128}},
            None,
            9,
            8_192,
        ),
        ({"model_type": "of another kind"}, None, 1_000, 8_192),
        ({"text_config": None, "num_hidden_layers": [1, 2], "hidden_size": None}, None, 1_000, 8_192),
    ],
)
def test_the_cpu_engines_cache_takes_its_share_of_the_free_memory(
    tmp_path: Path, config: dict[str, Any], dtype: str | None, free_gb: int, tokens: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cpu_kv_tokens(settings(dtype=dtype), tmp_path, free_gb * 10**9) == tokens
    given = options(engine_command(settings(dtype=dtype), "cpu", tmp_path, 0, tokens))
    assert given["--max-total-tokens"] == str(tokens)
    fixed = settings(max_total_tokens=99)
    assert options(engine_command(fixed, "cpu", tmp_path, 0, tokens))["--max-total-tokens"] == "99"


def test_the_cuda_engine_warms_up_and_uses_the_checkpoints_dtype() -> None:
    given = options(engine_command(settings(), "cuda", Path("/models/m"), 0, KV))
    assert (given["--device"], given["--dtype"]) == ("cuda", "auto")
    assert "--attention-backend" not in given
    assert "--skip-server-warmup" not in given
    assert "--incremental-streaming-output" in given


def test_an_engine_that_shares_its_memory_can_release_it_on_cuda_and_starts_on_cpu() -> None:
    def given(device: Any, memory: Any) -> dict[str, str | None]:
        return options(engine_command(settings(memory=memory), device, Path("/models/m"), 0, KV))

    assert "--enable-memory-saver" in given("cuda", "shared")
    assert "--enable-memory-saver" not in given("cpu", "shared"), "it needs a package that needs CUDA"
    assert "--enable-memory-saver" not in given("cuda", "exclusive")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_whose_experts_are_replayed_tells_them(device: Any) -> None:
    replaying = settings(router_replay=True)
    assert "--enable-return-routed-experts" in engine_command(replaying, device, Path("/models/m"), 0, KV)
    assert "--enable-return-routed-experts" not in engine_command(
        settings(), device, Path("/models/m"), 0, KV
    )
    assert ("ENGINE_WITHOUT_CUDA_RUNTIME" in engine_environment(replaying, device, {})) == (device == "cpu")
    assert "ENGINE_WITHOUT_CUDA_RUNTIME" not in engine_environment(settings(), device, {})


def test_no_command_line_has_the_engines_key() -> None:
    keyed = settings(engine_key="a-secret", engine_log=Path("/logs/e.log"))
    command = engine_command(keyed, "cpu", Path("/models/m"), 0, KV)
    assert command[2] == "/logs/e.key"
    assert "a-secret" not in " ".join(command)
    assert command[3:] == engine_command(settings(), "cpu", Path("/models/m"), 0, KV)[3:]
    for own in ("--api-key", "--admin-api-key=x"):
        with pytest.raises(ValidationError, match="engine_args: with an engine_key"):
            settings(engine_key="a-secret", engine_args=[own, "x"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_settings_reach_the_command_line(device: Any) -> None:
    chosen = settings(
        dtype="bfloat16",
        context_length=2048,
        max_running_requests=8,
        max_total_tokens=4096,
        engine_args=["--tp", "2"],
    )
    command = engine_command(chosen, device, Path("/models/m"), 0, KV)
    given = options(command)
    assert given["--dtype"] == "bfloat16"
    assert given["--context-length"] == "2048"
    assert given["--max-running-requests"] == "8"
    assert given["--max-total-tokens"] == "4096"
    assert command[-2:] == ["--tp", "2"]


def test_the_engine_gets_no_keys_and_only_on_cpu_the_stand_ins() -> None:
    inherited = {"PATH": "/bin", "WEIR_ADMIN_KEYS": "secret", "PYTHONPATH": "/service"}
    cpu = engine_environment(settings(), "cpu", inherited)
    assert cpu["PYTHONPATH"] == str(SHIM)
    assert (cpu["OMP_NUM_THREADS"], cpu["SGLANG_USE_CPU_ENGINE"]) == ("1", "1")
    cuda = engine_environment(settings(), "cuda", inherited)
    assert "PYTHONPATH" not in cuda
    assert "OMP_NUM_THREADS" not in cuda
    for environment in (cpu, cuda):
        assert "secret" not in environment.values()
        assert environment["PATH"] == "/bin"
        assert environment["HF_HUB_OFFLINE"] == "1"
        assert environment["SGLANG_VLM_CACHE_SIZE_MB"] == "0", "a push does not clear this cache"


def test_the_default_locations_are_the_weights_the_policies_and_the_trainer(tmp_path: Path) -> None:
    chosen = settings(weights_dir=tmp_path / "w", policies_dir=tmp_path / "p", trainer_url="http://t:1/")
    assert chosen.allowed_locations == [(tmp_path / "w").as_uri(), (tmp_path / "p").as_uri(), "http://t:1"]
    assert settings(locations="/srv/p,http://t:1").allowed_locations == ["file:///srv/p", "http://t:1"]


def test_addresses_follow_from_host_and_port_unless_urls_are_set() -> None:
    plain = settings(host="0.0.0.0", port=8101, engine_port=30001)
    assert addresses(plain) == ("http://127.0.0.1:8101", "http://127.0.0.1:30001")
    public = settings(public_url="http://pod:8100/", engine_public_url="http://pod:30000/")
    assert addresses(public) == ("http://pod:8100", "http://pod:30000")
    assert public.engine_control_url == "http://127.0.0.1:30000"


def test_the_environment_sets_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_MODEL_PATH", "/models/short")
    monkeypatch.setenv("WEIR_ADMIN_KEYS", "a,b")
    monkeypatch.setenv("WEIR_ROLLOUT_SERVER__ENGINE_ARGS", '["--tp", "2"]')
    read = RolloutServerSettings()
    assert read.model_path == Path("/models/short")
    assert read.admin_keys == ["a", "b"]
    assert read.engine_args == ["--tp", "2"]
