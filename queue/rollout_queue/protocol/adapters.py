"""LoRA adapters: what an engine has of them, in a rollout server's `GET /status` and after a reload."""

from rollout_queue.protocol.message import ServiceMessage


class AdapterShape(ServiceMessage):
    """A version that an engine answers with by an adapter, or without one by the weights alone."""

    version: int
    name: str | None
    """The adapter's name in requests to the engine (`lora_path`); null for the weights alone."""
