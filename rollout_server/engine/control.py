"""The control calls to one SGLang server: version, checksum, pause, load, resume, adapters, memory.

Every answer is checked.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import httpx
import msgspec

from rollout_queue.foreign_json import read_json
from rollout_queue.protocol.rollout_server_messages import EngineLoads, Joining

KV_CACHE, WEIGHTS = "kv_cache", "weights"
"""The parts of the memory that an engine releases."""


class EngineFailed(Exception):
    """The engine died, or a call to it failed. The text names the call and the reason."""


class AdapterRefused(EngineFailed):
    """The engine does not load an adapter, and goes on without it."""


class EngineRefused(EngineFailed):
    """The engine answered that it did not do it. It goes on as before."""


@dataclass(frozen=True)
class EngineLayout:
    """How many processes have a part of the engine's weights, and on what."""

    tensor_parallel: int
    other_replicas: int
    """The product of the sizes of pipeline and data parallelism."""
    device: str

    @classmethod
    def of(cls, server_info: dict[str, Any]) -> Self:
        """Raises EngineFailed."""
        try:
            sizes = {name: int(server_info[f"{name}_size"]) for name in ("tp", "pp", "dp")}
            return cls(sizes["tp"], sizes["pp"] * sizes["dp"], str(server_info["device"]))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFailed(f"/server_info: {error!r}") from error


class EngineControl:
    """Calls one engine. `control_timeout_s` bounds the quick calls, `load_timeout_s` loads, checksums and
    a token."""

    def __init__(self, client: httpx.AsyncClient, *, control_timeout_s: float, load_timeout_s: float) -> None:
        self._client = client
        self._control_timeout_s = control_timeout_s
        self._load_timeout_s = load_timeout_s

    async def is_ready(self) -> bool:
        """Whether the engine runs and is not paused.

        /health is not used, because it generates a token, and fails while the engine is paused.
        """
        return await self._answers("/ready")

    async def is_alive(self) -> bool:
        """Whether the engine runs, paused or not."""
        return await self._answers("/ping")

    async def version(self) -> str:
        return str((await self._call("GET", "/model_info")).get("weight_version"))

    async def checksum(self) -> str:
        """The checksum of all weights in the engine's memory."""
        answer = await self._call("POST", "/weights_checker", {"action": "checksum"}, self._load_timeout_s)
        checksum = answer.get("per_engine_checksum")
        if not answer.get("success") or not isinstance(checksum, str):
            raise EngineFailed(f"/weights_checker gives no checksum: {answer.get('message')}")
        return checksum

    async def pause(self, *, abort: bool = False) -> None:
        """Let nothing run. Requests go on later with the weights that are loaded then; `abort` ends them."""
        await self._call("POST", "/pause_generation", {"mode": "abort" if abort else "retract"})

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def load(self, model_path: str, version: int) -> None:
        body = {"model_path": model_path, "weight_version": str(version), "flush_cache": True}
        answer = await self._call("POST", "/update_weights_from_disk", body, self._load_timeout_s)
        if not answer.get("success"):
            raise EngineFailed(f"/update_weights_from_disk: {answer.get('message')}")

    async def adapters(self) -> set[str]:
        """The names of the adapters that can be called."""
        listed = (await self._call("GET", "/v1/models")).get("data") or []
        return {str(model["id"]) for model in listed if model.get("parent") is not None}

    async def load_adapter(self, name: str, directory: str) -> None:
        """Load a LoRA adapter under a name of its own; requests that run go on. Raises AdapterRefused."""
        body = {"lora_name": name, "lora_path": directory}
        answer = await self._call("POST", "/load_lora_adapter", body, self._load_timeout_s, (200, 400))
        if not answer.get("success"):
            raise AdapterRefused(f"the engine refuses the adapter {name}: {answer.get('error_message')}")

    async def try_adapter(self, name: str) -> None:
        """Sample one token with an adapter: an engine that cannot apply it dies then."""
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "lora_path": name,
        }
        # It waits in the engine's queue, behind the calls that run.
        answer = await self._call("POST", "/generate", body, self._load_timeout_s)
        sampled = (answer.get("meta_info") or {}).get("output_token_logprobs")
        if not sampled or not math.isfinite(sampled[0][0]):
            raise EngineFailed(f"the adapter {name} gives no log-probability: {answer}"[:500])

    async def flush(self) -> bool:
        """Empty the cache. Returns whether the engine was idle: requests in the queue of a paused engine do
        not count."""
        try:
            response = await self._client.post("/flush_cache", timeout=self._control_timeout_s)
        except httpx.HTTPError as error:
            raise EngineFailed(f"/flush_cache: {error!r}") from error
        return response.status_code == httpx.codes.OK

    async def release(self, tag: str) -> None:
        """Free a part of the engine's memory. Its content is lost. SGLang dies if a request runs."""
        await self._call("POST", "/release_memory_occupation", {"tags": [tag]}, self._load_timeout_s)

    async def reoccupy(self, tag: str) -> None:
        """Take a part of the memory again that was released. SGLang dies if it was not released."""
        await self._call("POST", "/resume_memory_occupation", {"tags": [tag]}, self._load_timeout_s)

    async def layout(self) -> EngineLayout:
        """How the engine's weights are divided."""
        return EngineLayout.of(await self._call("GET", "/server_info"))

    async def join_group(self, joining: Joining, timeout_s: float) -> None:
        """Have every rank of the engine join the trainer's process group. Raises EngineRefused if they could
        not, and stay as they are."""
        body = {
            "master_address": joining.master_address,
            "master_port": joining.master_port,
            "rank_offset": 1,
            "world_size": joining.world_size,
            "group_name": joining.group,
            "backend": joining.backend,
        }
        await self._call("POST", "/init_weights_update_group", body, timeout_s)

    async def receive(self, joining: Joining, version: int, timeout_s: float) -> None:
        """Take every bucket of tensors, each within `timeout_s`. If this fails, the engine may have a part of
        them."""
        await self._call("POST", "/begin_weight_update", {}, timeout_s)
        for bucket in joining.buckets:
            last = bucket is joining.buckets[-1]
            body = {
                "names": [tensor.name for tensor in bucket],
                "dtypes": [tensor.dtype for tensor in bucket],
                "shapes": [tensor.shape for tensor in bucket],
                "group_name": joining.group,
                "load_format": "flattened_bucket",
                # A version, or an empty cache, belongs to whole weights only.
                "flush_cache": last,
                "weight_version": str(version) if last else None,
            }
            await self._call("POST", "/update_weights_from_distributed", body, timeout_s)
        await self._call("POST", "/end_weight_update", {}, timeout_s)

    async def leave_group(self, group: str) -> None:
        await self._call("POST", "/destroy_weights_update_group", {"group_name": group})

    async def read_load(self) -> EngineLoads:
        """What the engine says of its load."""
        answer = await self._call("GET", "/v1/loads", timeout_s=2.0)
        try:
            return msgspec.convert(answer, type=EngineLoads, strict=False)
        except msgspec.ValidationError as error:
            raise EngineFailed(f"/v1/loads: {error}") from error

    async def _answers(self, path: str) -> bool:
        try:
            return (await self._client.get(path, timeout=self._control_timeout_s)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        expected: tuple[int, ...] = (200,),
    ) -> dict[str, Any]:
        timeout_s = timeout_s or self._control_timeout_s
        try:
            response = await self._client.request(method, path, json=body, timeout=timeout_s)
            answer = read_json(response.content)
        except (httpx.HTTPError, ValueError) as error:
            raise EngineFailed(f"{path}: {error!r}") from error
        if response.status_code not in expected or not isinstance(answer, dict | None):
            kind = EngineRefused if response.status_code == 400 else EngineFailed
            raise kind(f"{path} answers {response.status_code}: {response.text[:500]}")
        return answer or {}  # a release of memory is answered with null
