"""Makes the CUDA build of torchvision, the only one on the package index, importable beside a CPU torch.

Python imports `sitecustomize` by itself at start, in SGLang's child processes too. torchvision's
compiled operators cannot load without CUDA libraries, and its Python half then fails because two of
them are not declared. SGLang needs the import, never the operators, so declaring them is enough.

With the variable ENGINE_WITHOUT_PINNED_MEMORY, torch ignores requests for pinned memory: SGLang makes
them for LoRA adapters on every device, and a CPU torch refuses them. With ENGINE_WITHOUT_CUDA_RUNTIME,
host memory is registered with CUDA in name only: SGLang registers its record of routed experts.
"""

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class DeclareTorchvisionOperators(MetaPathFinder):
    """Declares the operators once, just before the first import of torchvision."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        sys.meta_path.remove(self)
        # Imported by name, because only the engine's environment has torch, and the service's has not.
        torch: Any = importlib.import_module("torch")
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch._weir_torchvision_library = library  # the declarations live as long as this object
        if os.environ.get("ENGINE_WITHOUT_PINNED_MEMORY"):
            ignore_pinned_memory(torch)
        if os.environ.get("ENGINE_WITHOUT_CUDA_RUNTIME"):
            torch.cuda.cudart = NoCudaRuntime
        return importlib.util.find_spec(fullname)


class NoCudaRuntime:
    """The part of CUDA's runtime that registers host memory. 0 means success."""

    def cudaHostRegister(self, *_: Any) -> int:  # noqa: N802 - CUDA's name
        return 0

    def cudaHostUnregister(self, *_: Any) -> int:  # noqa: N802
        return 0


def ignore_pinned_memory(torch: Any) -> None:
    """Let the functions that make tensors drop the option `pin_memory`."""
    for name in ("empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor


def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    """The function without the option `pin_memory`."""

    @functools.wraps(make)
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        return make(*arguments, **options)

    return made


sys.meta_path.insert(0, DeclareTorchvisionOperators())
