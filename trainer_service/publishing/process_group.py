"""Rank 0 of a process group in which engines receive tensors, apart from the group that trains.

SGLang's engines join with torch's private helper, which puts the group's name before every key of the store.
The same prefixes are built here. The helper itself is not called: it changes torch's global state, which the
training thread uses.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo

BACKLOG = 64


class Broadcaster(Protocol):
    """The sending rank of a group."""

    def broadcast(self, tensor: Tensor) -> None: ...


@contextmanager
def listening_store(address: str, timeout_s: float) -> Iterator[tuple[TCPStore, int]]:
    """A store for the ranks of one group, which listens on `address` only, and its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen(BACKLOG)
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # the store closes it
    yield (
        TCPStore(
            address,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        ),
        port,
    )


@contextmanager
def joined_group(
    store: TCPStore, name: str, ranks: int, device: torch.device, address: str, timeout_s: float
) -> Iterator[Broadcaster]:
    """Join as rank 0, and wait for the other ranks. `ranks` counts this one. Each broadcast may take
    `timeout_s`. Raises RuntimeError if a rank does not come in time."""
    own = PrefixStore(f"{device.type}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    make = _nccl if device.type == "cuda" else _gloo
    group = make(own, ranks, address, timedelta(seconds=timeout_s))
    try:
        yield _Group(group, timeout_s)
    except BaseException:
        group.abort()  # NCCL's shutdown may wait for the other ranks
        raise
    group.shutdown()


class _Group:
    def __init__(self, group: Any, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s

    def broadcast(self, tensor: Tensor) -> None:
        """Raises RuntimeError if a rank does not take the tensor in time, or is gone."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        # NCCL connects the ranks in the first broadcast, and has no timeout for that.
        guard = threading.Timer(2 * self._timeout_s, self._group.abort)
        guard.start()
        try:
            self._group.broadcast([tensor], options).wait()
        finally:
            guard.cancel()


def _gloo(store: PrefixStore, ranks: int, address: str, timeout: timedelta) -> Any:
    options: Any = getattr(ProcessGroupGloo, "_Options")()  # noqa: B009 - torch's stubs lack it
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(store, 0, ranks, options)


def _nccl(store: PrefixStore, ranks: int, address: str, timeout: timedelta) -> Any:
    """NCCL chooses its interface itself: set NCCL_SOCKET_IFNAME for that."""
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # torch's CPU build has none

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Otherwise, torch's watchdog ends the whole process when a broadcast takes too long. A group reads this
    # variable once, when it is made.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        return ProcessGroupNCCL(store, 0, ranks, options)
    finally:
        del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
