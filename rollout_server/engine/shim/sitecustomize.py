"""Makes the CUDA build of torchvision, the only one on the package index, importable beside a CPU torch.

Python imports `sitecustomize` by itself at start, in SGLang's child processes too. torchvision's
compiled operators cannot load without CUDA libraries, and its Python half then fails because two of
them are not declared. SGLang needs the import, never the operators, so declaring them is enough.

With the variable ENGINE_WITHOUT_PINNED_MEMORY, torch ignores requests for pinned memory: SGLang makes
them for LoRA adapters on every device, and a CPU torch refuses them. With ENGINE_WITHOUT_CUDA_RUNTIME,
host memory is registered with CUDA in name only: SGLang registers its record of routed experts.

In SGLang's LoRA backend for CPU, each row of the output head gets the adapter of its own call. SGLang 0.5.23
counts all tokens of a prefill there, although the head is computed for a few tokens of each call only. So
calls got each other's adapters.

SGLang imports the module of Qwen's image processor only if some operators of Qwen3.5 are in
`torch.ops.sgl_kernel`. The package for CPU lacks them, so they are declared here by name.
"""

import dataclasses
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

LOOKED_UP = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_gdn_gating_cpu",
)
"""The operators that are looked up at import. No others: SGLang calls some of them where it finds them."""


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
        if torch.version.cuda is None:  # beside a build with CUDA, torchvision declares them itself
            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            torch._weir_torchvision_library = library  # the declarations live as long as this object
        for name in LOOKED_UP:
            setattr(torch.ops.sgl_kernel, name, missing(name))
        if os.environ.get("ENGINE_WITHOUT_PINNED_MEMORY"):
            ignore_pinned_memory(torch)
        if os.environ.get("ENGINE_WITHOUT_CUDA_RUNTIME"):
            torch.cuda.cudart = NoCudaRuntime
        return importlib.util.find_spec(fullname)


class SegmentTheHead(MetaPathFinder):
    """Corrects the LoRA backend once, just after its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "sglang.srt.lora.backend.torch_backend":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_correct(module: ModuleType) -> None:
                execute(module)
                segment_the_head(module.TorchNativeLoRABackend)

            spec.loader.exec_module = execute_and_correct  # type: ignore[method-assign]
        return spec


class NoCudaRuntime:
    """The part of CUDA's runtime that registers host memory. 0 means success."""

    def cudaHostRegister(self, *_: Any) -> int:  # noqa: N802 - CUDA's name
        return 0

    def cudaHostUnregister(self, *_: Any) -> int:  # noqa: N802
        return 0


def missing(name: str) -> Callable[..., Any]:
    """A stand-in for the operator, which raises when it is called."""

    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} was called, and only its stand-in is installed")

    return call


def ignore_pinned_memory(torch: Any) -> None:
    """Let the functions that make tensors drop the option `pin_memory`."""
    for name in ("empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor


def segment_the_head(backend: Any) -> None:
    """Let this class of backends do what SGLang's other ones do for the head: tell its layer which rows of a
    prefill belong to which call, and use what the layer passes on."""
    torch: Any = importlib.import_module("torch")
    utils: Any = importlib.import_module("sglang.srt.lora.utils")
    prepare = backend.prepare_lora_batch

    def rows(whole: Any, adapters: list[int], lengths: list[int]) -> Any:
        return dataclasses.replace(
            whole,
            weight_indices_cpu=torch.tensor(adapters, dtype=torch.int32),
            seg_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
            expected_tokens=sum(lengths),
        )

    def prepare_lora_batch(self: Any, forward_batch: Any, adapters: Any, *more: Any, **named: Any) -> None:
        prepare(self, forward_batch, adapters, *more, **named)
        self.lm_head_batch_info = self.lm_head_pass_batch_infos = None
        if (lengths := utils.get_lm_head_pruned_lens(forward_batch)) is not None:
            self.lm_head_batch_info = rows(self.batch_info, adapters, lengths)
            passes = self._get_lm_head_pass_segments(adapters, lengths)
            self.lm_head_pass_batch_infos = passes and [rows(self.batch_info, *each) for each in passes]

    backend.prepare_lora_batch = prepare_lora_batch
    for name in ("run_lora_a_sgemm", "run_lora_b_sgemm"):
        setattr(backend, name, with_own_rows(getattr(backend, name)))


def with_own_rows(multiply: Callable[..., Any]) -> Callable[..., Any]:
    """The method with the option `pruned_batch_info`: which rows belong to which call."""

    @functools.wraps(multiply)
    def multiplied(self: Any, *arguments: Any, pruned_batch_info: Any = None, **options: Any) -> Any:
        whole = self.batch_info
        self.batch_info = pruned_batch_info or whole
        try:
            return multiply(self, *arguments, **options)
        finally:
            self.batch_info = whole

    return multiplied


def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    """The function without the option `pin_memory`."""

    @functools.wraps(make)
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        return make(*arguments, **options)

    return made


sys.meta_path[:0] = [DeclareTorchvisionOperators(), SegmentTheHead()]
