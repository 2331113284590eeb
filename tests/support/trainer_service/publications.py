"""Publications in tests: one that is complete when it has begun, and weights of one tensor."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rollout_queue.contract.policies.policy import FileSpec, TensorSpec, sha256_of
from trainer_service.model.huggingface import WEIGHTS
from trainer_service.model.snapshot import HostTensor


class InlineExecutor(Executor):
    """Runs a call before `submit` returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # as an executor's thread does
            future.set_exception(error)
        return future


@dataclass(frozen=True)
class OneTensor:
    """A snapshot of weights with one number."""

    name: str
    number: int
    tensors: Sequence[HostTensor] = ()

    def write(self, directory: Path) -> Sequence[FileSpec]:
        path = directory / WEIGHTS
        save_file({self.name: np.array([self.number])}, path)
        tensors = [TensorSpec(self.name, [1], "I64")]
        return [FileSpec(path.name, path.stat().st_size, sha256_of(path), tensors)]
