"""Makes the CUDA build of torchvision, the only one on the package index, importable beside a CPU torch.

Python imports `sitecustomize` by itself at start, in SGLang's child processes too. torchvision's
compiled operators cannot load without CUDA libraries, and its Python half then fails because two of
them are not declared. SGLang needs the import, never the operators, so declaring them is enough.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
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
        return importlib.util.find_spec(fullname)


sys.meta_path.insert(0, DeclareTorchvisionOperators())
