"""The trainer's HTTP side in a process of its own: it sends the tensors of published files to engines.

python -m tests.support.trainer_service.sending PORT POLICIES_DIRECTORY

POST /offer/{version} makes the tensors of that version's files the newest snapshot. `?at=2&signal=19` sends
this process the signal before the third bucket of a transfer.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file
from torch import Tensor

from rollout_queue.http.callers import Keyring
from trainer_service.app import create_app
from trainer_service.model.host_copies import HostTensor
from trainer_service.publishing.process_group import Broadcaster, joined_group
from trainer_service.publishing.tensor_sender import TensorSender
from trainer_service.settings import CollectiveSettings
from trainer_service.shared_state import SharedState
from trainer_service.storage.policy_store import PolicyStore, manifest_sha256

BUCKET_BYTES = 2**16
"""So that even a tiny model has many buckets."""


class Interruption:
    """A signal that this process sends to itself in the middle of a transfer, once."""

    def __init__(self) -> None:
        self.at, self.number = -1, 0

    @contextmanager
    def joined(self, *given: Any) -> Iterator[Broadcaster]:
        with joined_group(*given) as group:
            yield InterruptedBroadcaster(group, self)


class InterruptedBroadcaster:
    """Sends the signal before one of the broadcasts."""

    def __init__(self, group: Broadcaster, interruption: Interruption) -> None:
        self._group, self._interruption, self._sent = group, interruption, 0

    def broadcast(self, tensor: Tensor) -> None:
        if self._sent == self._interruption.at:
            self._interruption.at = -1
            os.kill(os.getpid(), self._interruption.number)
        self._sent += 1
        self._group.broadcast(tensor)


def main(port: int, policies: Path) -> None:
    store = PolicyStore(policies, policies, keep=100)
    interruption = Interruption()
    sender = TensorSender(
        CollectiveSettings(timeout_s=20),
        torch.device("cpu"),
        bucket_bytes=BUCKET_BYTES,
        join=interruption.joined,
    )
    app = create_app(SharedState(), lambda *_: [], store, Keyring([], []), CollectorRegistry(), sender)

    @app.post("/offer/{version}")
    def offer(version: int, at: int = -1, signal: int = 0) -> None:
        interruption.at, interruption.number = at, signal
        path = store.path_of(version)
        tensors = [HostTensor(name, value) for name, value in load_file(path / "model.safetensors").items()]
        sender.withdraw()
        sender.offer(version, manifest_sha256(path), tensors)

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
