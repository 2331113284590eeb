"""vLLM's control of an engine, as prime-rl's orchestrator calls it: orchestrator ─▶ rollout server.

POST /pause?mode=keep ─▶ POST /update_weights ─▶ POST /resume
POST /load_lora_adapter
"""

from typing import Literal

from pydantic import ConfigDict, Field

from rollout_queue.protocol.adapters import ADAPTER_NAME
from rollout_queue.protocol.message import ServiceMessage


class UpdateWeightsBody(ServiceMessage):
    """A directory with weights. Null means that they come over NCCL, which no rollout server takes."""

    model_config = ConfigDict(extra="forbid", strict=False)

    weight_dir: str | None = Field(max_length=4096)
    skip_prefix_cache_reset: bool = False
    """Without effect: new weights always come with an empty cache."""


class LoadAdapterBody(ServiceMessage):
    """A directory with a LoRA adapter, and the name of the policy that it is."""

    model_config = ConfigDict(extra="forbid", strict=False)

    lora_name: str = Field(pattern=ADAPTER_NAME)
    lora_path: str = Field(max_length=4096)
    load_inplace: bool = False
    """Without effect: each version of a name is loaded beside the former ones."""


class EngineRouteDone(ServiceMessage):
    """It is done. `version` is the one that is served, or the adapter's."""

    status: Literal["ok"] = "ok"
    version: int
