"""A copy of the adapters alone in host memory, which is written as a version in PEFT's layout."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_queue.contract.policies.policy import ADAPTER_CONFIG, ADAPTER_WEIGHTS, FileSpec
from trainer_service.model.snapshot import HostTensor, write_file


@dataclass(frozen=True)
class AdapterSnapshot:
    """The adapters after one step. `write` may be called in another thread."""

    config: bytes
    """The text of adapter_config.json."""
    tensors: Sequence[HostTensor]

    def write(self, directory: Path) -> list[FileSpec]:
        """Write both files into `directory`. Returns what a manifest says of them. Raises OSError."""
        (directory / ADAPTER_CONFIG).write_bytes(self.config)
        digest = hashlib.sha256(self.config).hexdigest()
        config = FileSpec(ADAPTER_CONFIG, len(self.config), digest)
        return [config, write_file(directory / ADAPTER_WEIGHTS, self.tensors)]
