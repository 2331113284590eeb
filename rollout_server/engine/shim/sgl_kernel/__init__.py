"""Stands in for `sgl_kernel` where there is no GPU, so that SGLang runs on its torch-native code.

SGLang imports names from `sgl_kernel` at start also for `--device cpu`, and the package index has
CUDA builds only, which do not load without a driver. This module has every name, as a function that
raises when it is called; the torch-native path of Qwen3 and Llama calls none. The module declares no
torch operator, because SGLang would take `sgl_kernel::convert_weight_packed` as a sign of AMX kernels.
"""

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0+weir"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but only the CPU stand-in is installed")

    absent.__name__ = name
    return absent
