"""SGLang's command line and environment, as functions of the settings and of the free memory."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rollout_queue.model_files import CONFIG, json_object, text_config
from rollout_server.settings import Device, RolloutServerSettings

KEYED = Path(__file__).with_name("keyed.py")
"""Starts an engine that asks for a key."""
SHIM = Path(__file__).parent / "shim"
"""Stand-ins for modules that need CUDA. Only an engine on CPU has them on its path."""
NO_PINNED_MEMORY = "ENGINE_WITHOUT_PINNED_MEMORY"
"""With this variable, `SHIM` lets torch ignore requests for pinned memory, which need CUDA."""
NO_CUDA_RUNTIME = "ENGINE_WITHOUT_CUDA_RUNTIME"
"""With this variable, `SHIM` answers the calls that register host memory with CUDA."""
CPU_MAX_RUNNING_REQUESTS = 64
MOST_KV_TOKENS, FEWEST_KV_TOKENS = 65_536, 8_192
"""Of the KV cache on CPU. With fewer tokens, two conversations of an agent hardly fit."""
KV_SHARE = 0.03
"""The part of the free memory that the KV cache takes on CPU: SGLang writes all of it at its start, and the
trainer needs most of the rest."""


def find_device(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    """`auto` is CUDA if nvidia-smi lists a GPU, else CPU."""
    if wanted != "auto":
        return wanted
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return "cpu"
    listed = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, check=False, timeout=30)
    return "cuda" if listed.returncode == 0 and "GPU" in listed.stdout else "cpu"


def engine_command(
    settings: RolloutServerSettings, device: Device, model_path: Path, version: int, kv_tokens: int
) -> list[str]:
    """SGLang's command line. It starts with the weights of `version`, so a restart needs no reload.

    `kv_tokens` is how many tokens the KV cache has on CPU if the settings do not say it."""
    keyed = [str(KEYED), str(settings.engine_key_path)]
    command = [
        settings.engine_python,
        *(["-m", "sglang.launch_server"] if settings.engine_key is None else keyed),
    ]
    command += ["--model-path", str(model_path), "--weight-version", str(version)]
    command += ["--host", settings.engine_host, "--port", str(settings.engine_port)]
    command += ["--random-seed", str(settings.random_seed)]
    # Each chunk of a stream has only the new tokens, so an answer costs O(tokens) bytes, not O(tokens²).
    command += ["--incremental-streaming-output", "--sleep-on-idle", "--log-level-http", "warning"]
    command += _cpu(settings, kv_tokens) if device == "cpu" else _cuda(settings)
    command += _lora(settings, device)
    if settings.router_replay:
        command.append("--enable-return-routed-experts")
    if settings.context_length is not None:
        command += ["--context-length", str(settings.context_length)]
    return command + settings.engine_args


def engine_dtype(settings: RolloutServerSettings, device: Device) -> str:
    return settings.dtype or ("float32" if device == "cpu" else "auto")


def engine_environment(
    settings: RolloutServerSettings, device: Device, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """This process's environment without Weir's variables, with SGLang offline, and on CPU with `SHIM`."""
    environment = {name: value for name, value in inherited.items() if not name.startswith("WEIR_")}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    # SGLang would answer to an image that it has seen before with what former weights made of it.
    environment["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    # PYTHONPATH names this service's packages; the engine has other versions of them.
    environment.pop("PYTHONPATH", None)
    if device == "cpu":
        # With more OpenMP threads than free cores, the engine is up to a hundred times slower.
        environment |= {"OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(SHIM)}
        if settings.lora is not None:
            environment[NO_PINNED_MEMORY] = "1"
        if settings.router_replay:
            environment[NO_CUDA_RUNTIME] = "1"
    return environment


def _lora(settings: RolloutServerSettings, device: Device) -> list[str]:
    lora = settings.lora
    if lora is None:
        return []
    return [
        *("--enable-lora", "--max-lora-rank", str(lora.max_rank)),
        *("--max-loaded-loras", str(lora.max_loaded), "--max-loras-per-batch", str(lora.max_per_batch)),
        *(["--lora-backend", "torch_native"] if device == "cpu" else []),
        *("--lora-target-modules", *lora.target_modules),
    ]


def cpu_kv_tokens(settings: RolloutServerSettings, model_path: Path, free_bytes: int) -> int:
    """How many tokens the KV cache of an engine on CPU has. If the settings do not say it, those that fit
    into `KV_SHARE` of the free memory, within the bounds. Raises BrokenWeights."""
    if settings.max_total_tokens is not None:
        return settings.max_total_tokens
    of_token = kv_bytes_of_token(settings, model_path)
    fitting = int(KV_SHARE * free_bytes) // of_token if of_token else 0
    return max(FEWEST_KV_TOKENS, min(MOST_KV_TOKENS, fitting))


def kv_bytes_of_token(settings: RolloutServerSettings, model_path: Path) -> int:
    """The bytes of a token's keys and values in all layers, on CPU; 0 for a kind of model that names the
    facts in another way. Raises BrokenWeights."""
    config = text_config(json_object(model_path / CONFIG))

    def said(name: str) -> int:
        value = config.get(name)
        return value if isinstance(value, int) else 0

    heads, layers = said("num_attention_heads"), said("num_hidden_layers")
    width = said("head_dim") or said("hidden_size") // max(heads, 1)
    value_bytes = 4 if engine_dtype(settings, "cpu") == "float32" else 2
    return 2 * layers * (said("num_key_value_heads") or heads) * width * value_bytes


def _cpu(settings: RolloutServerSettings, kv_tokens: int) -> list[str]:
    return [
        *("--device", "cpu", "--attention-backend", "torch_native"),
        *("--dtype", engine_dtype(settings, "cpu")),
        *("--mem-fraction-static", "0.5"),
        *("--max-total-tokens", str(settings.max_total_tokens or kv_tokens)),
        *("--max-running-requests", str(settings.max_running_requests or CPU_MAX_RUNNING_REQUESTS)),
        # Nothing is compiled on CPU, so a warm-up only costs a second of every boot.
        "--skip-server-warmup",
    ]


def _cuda(settings: RolloutServerSettings) -> list[str]:
    arguments = ["--device", "cuda", "--dtype", engine_dtype(settings, "cuda"), "--enable-metrics"]
    if settings.memory == "shared":
        arguments.append("--enable-memory-saver")  # needs CUDA; elsewhere, a release frees nothing
    if settings.max_total_tokens is not None:
        arguments += ["--max-total-tokens", str(settings.max_total_tokens)]
    if settings.max_running_requests is not None:
        arguments += ["--max-running-requests", str(settings.max_running_requests)]
    return arguments
