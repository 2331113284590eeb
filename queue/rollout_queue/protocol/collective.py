"""Tensors by a process group: a rollout server asks the trainer to send a version to its engine.

rollout server ── GET /collective/{version} ─▶ trainer      does it still have the tensors?
rollout server ── POST /collective/{version}, JoinBody ─▶ trainer ── Joining ─▶ engine joins, and receives
rollout server ── DELETE /collective/{group} ─▶ trainer      the engine has them, or has given up
"""

from typing import Literal

from pydantic import Field

from rollout_queue.protocol.message import ServiceMessage

Device = Literal["cpu", "cuda"]


class JoinBody(ServiceMessage):
    """What the trainer has to know of the engine."""

    manifest_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    ranks: int = Field(ge=1, le=1024)
    """The engine's tensor-parallel size."""
    device: Device
    wait_s: float = Field(gt=0, le=600)
    """How long the server waits for its turn."""


class SentTensor(ServiceMessage):
    """One tensor of a bucket."""

    name: str
    dtype: str
    """torch's name: float32, bfloat16, …"""
    shape: tuple[int, ...]
    fingerprint: int
    """The sum of the bits of its first `FINGERPRINT_VALUES` values, taken as signed whole numbers."""


FINGERPRINT_VALUES = 2**20


class Joining(ServiceMessage):
    """Where the engine's ranks 1 … `world_size` - 1 join. Rank 0 is the trainer. It broadcasts one array of
    bytes for each bucket: the tensors of the bucket, one after the other."""

    master_address: str
    master_port: int
    group: str
    backend: Literal["gloo", "nccl"]
    world_size: int
    buckets: tuple[tuple[SentTensor, ...], ...]
