"""Publications in tests: one that is complete when it has begun, and weights of one tensor."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rollout_queue.contract.published_policy import FileSpec, TensorSpec, sha256_of
from trainer_service.model.host_copies import HostTensor
from trainer_service.model.huggingface import WEIGHTS


class InlineExecutor(Executor):
    """Runs a call before `submit` returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # as an executor's thread does
            future.set_exception(error)
        return future


class LateExecutor(Executor):
    """Runs a call when somebody asks `looks` times whether it is done, or waits for it."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        return LateFuture(lambda: fn(*args, **kwargs), self._looks)


class LateFuture(Future[Any]):
    def __init__(self, call: Callable[[], Any], looks: int) -> None:
        super().__init__()
        self._call, self._looks = call, looks

    def done(self) -> bool:
        if self._looks == 0:
            self._run()
        self._looks -= 1
        return super().done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._run()
        return super().exception(timeout)

    def _run(self) -> None:
        if not super().done():
            try:
                self.set_result(self._call())
            except BaseException as error:
                self.set_exception(error)


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
