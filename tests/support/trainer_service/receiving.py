"""The engine's rank of a process group, in this process: it receives what a `TensorSender` sends."""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo

from rollout_queue.protocol.rollout_server_messages import Joining, SentTensor


def join(joining: Joining, timeout_s: float = 20.0) -> Any:
    """Join as the engine does. Raises RuntimeError."""
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(joining.master_address, joining.master_port, timeout=timeout)
    name = joining.group
    own = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    return ProcessGroupGloo(own, 1, joining.world_size, timeout)


def receive_bucket(
    group: Any, bucket: tuple[SentTensor, ...], timeout_s: float | None = None
) -> dict[str, Tensor]:
    """The tensors of one broadcast. Each begins at a multiple of the size of its values. Raises RuntimeError
    if the sender has gone, or after the timeout, which is otherwise the group's."""
    dtypes = [getattr(torch, tensor.dtype) for tensor in bucket]
    shapes = [torch.Size(tensor.shape) for tensor in bucket]
    sizes = [dtype.itemsize * shape.numel() for dtype, shape in zip(dtypes, shapes, strict=True)]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    if timeout_s is not None:
        options.timeout = timedelta(seconds=timeout_s)
    group.broadcast([flat], options).wait()
    received, place = {}, 0
    for tensor, dtype, shape, size in zip(bucket, dtypes, shapes, sizes, strict=True):
        assert place % dtype.itemsize == 0, "SGLang refuses tensors that are not aligned"
        received[tensor.name] = flat[place : place + size].view(dtype).reshape(shape)
        place += size
    return received


def receive(joining: Joining) -> dict[str, Tensor]:
    """All tensors of a transfer."""
    group = join(joining)
    return {
        name: value for bucket in joining.buckets for name, value in receive_bucket(group, bucket).items()
    }
