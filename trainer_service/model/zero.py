"""Imports and configures DeepSpeed, joins its process group, gathers weights that ZeRO partitions, and moves
states between device and host."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from trainer_service.model.settings import ModelSettings


def deepspeed_config(settings: ModelSettings, on_cuda: bool) -> dict[str, object]:
    """DeepSpeed's JSON configuration for these settings."""
    half = settings.precision == "bfloat16"
    # Gradients are reduced while the backward pass goes on. Where every rank keeps all gradients, DeepSpeed
    # does not support this together with steps of any number of passes.
    overlap = on_cuda and settings.sharding_stage >= 2
    zero: dict[str, object] = {"stage": settings.sharding_stage, "overlap_comm": overlap}
    if half:
        zero["reduce_scatter"] = False  # at stage 2 it reduces in bfloat16 whatever the settings say
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        # Required, but unused: micro-batches differ in size, and step() is called once for each step.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        # Otherwise an offloaded optimizer must be DeepSpeed's own, which is compiled at the start.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "bf16": {"enabled": half},
        # Gradients of bfloat16 weights are added up and reduced in float32.
        **({"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"} if half else {}),
        # At stage 0 the optimizer clips: see ClippingAdamW.
        "gradient_clipping": settings.optimizer.max_grad_norm if settings.zero_stage else 0.0,
        "steps_per_print": 1_000_000_000,
    }


def reference_config(settings: ModelSettings, on_cuda: bool) -> dict[str, object]:
    """DeepSpeed's JSON configuration for a model that is partitioned and not trained. It gathers the weights
    of a layer when the layer needs them, and drops them at once."""
    zero: dict[str, object] = {
        "stage": 3,
        "overlap_comm": False,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }
    if settings.reference_offload:
        zero["offload_param"] = {"device": "cpu"}
    return deepspeed_config(settings, on_cuda) | {"zero_optimization": zero}


def wants_cuda(settings: ModelSettings) -> bool:
    """Whether these settings train on CUDA."""
    return settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())


def prepare_deepspeed(settings: ModelSettings) -> ModuleType:
    """Import DeepSpeed for the chosen device and join the process group. Without a launcher, the group has
    one process. Raises ValueError for CUDA with an `auto` that nobody replaced."""
    cpu = not wants_cuda(settings)
    if not cpu and "auto" in (settings.dtype, settings.activation_checkpointing):
        raise ValueError("on CUDA, sizing.resolved must replace each auto before the model is loaded")
    if cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    import deepspeed
    from torch._C._distributed_c10d import HashStore

    # On CPU, DeepSpeed compiles a shared-memory all-reduce at the start, for which an image would need gcc
    # and ninja. Only inference_all_reduce calls it, so it is disabled. This is a private name of the pinned
    # release; `import deepspeed.comm.torch` would resolve to the real torch.
    comm: Any = sys.modules["deepspeed.comm.torch"]
    comm.build_shm_op = lambda: None
    _let_weights_be_freed()
    backend = "gloo" if cpu else "nccl"
    if not torch.distributed.is_initialized() and "WORLD_SIZE" not in os.environ:
        torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    module: ModuleType = deepspeed
    return module


def _let_weights_be_freed() -> None:
    """Let the collector free weights while a model is made. DeepSpeed keeps the names of a model's weights
    until the next one is made, and then goes through them. A weight that is freed takes its name out, which
    is an error in a loop over the names themselves; so the loop is over a copy. The names are private to the
    pinned release."""

    class Finalizers(dict[int, Any]):
        def values(self) -> Any:
            return list(super().values())

    debug: Any = sys.modules["deepspeed.utils.debug"]
    for names in (debug.module_names, debug.param_names):
        names._finalizers = Finalizers(names._finalizers)


def uses_cuda() -> bool:
    """Whether the process group that `prepare_deepspeed` joined is one of GPUs."""
    return bool(torch.distributed.get_backend() == "nccl")


def offload_states(engine: Any) -> None:
    """Move the weights and the optimizer's state of a DeepSpeed engine of stage 1 or 2 to host memory. There
    must be no gradient."""
    for parameter in _frozen(engine):
        parameter.data = parameter.data.to("cpu")
    engine.offload_states()


def reload_states(engine: Any) -> None:
    """Move everything back to the device."""
    for parameter in _frozen(engine):
        parameter.data = parameter.data.to(engine.device)
    engine.reload_states()


def end_failed_backward(engine: Any) -> None:
    """End a backward pass in which an error was raised; without this, DeepSpeed refuses the next one. On
    several ranks it would wait for the others.

    The first gradient of a pass makes the buffers of stages 1 and 2. If they do not fit into the memory,
    DeepSpeed has none, and cannot end the pass. Empty ones stand in for them until the next pass."""
    if hasattr(engine.optimizer, "setup_buckets"):
        for dtype, bucket in engine.optimizer.ipg_buckets.items():
            if not bucket.buffer:
                bucket.buffer.append(torch.empty(0, dtype=dtype, device=engine.device))
                bucket.index = 0
    engine._backward_epilogue()


def _frozen(engine: Any) -> list[Tensor]:
    """The weights that DeepSpeed does not move, because its optimizer does not have them."""
    return [each for each in engine.module.parameters() if not each.requires_grad]


@contextmanager
def gathered(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Inside the context, every rank has these weights in full. Outside it, each rank has only a part of them
    at stage 3. All ranks must enter such contexts in the same order."""
    partitioned = [each for each in parameters if hasattr(each, "ds_id")]
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned):
        yield


def assign(parameter: Tensor, value: Tensor) -> None:
    """Give a weight this value, also if each rank has only a part of it. Every rank must call it, with the
    same value."""
    if not hasattr(parameter, "ds_id"):
        parameter.data.copy_(value)
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data.copy_(value)


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of the full parameter, even if this rank has only a part of it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def local_part(parameter: Tensor) -> Tensor:
    """The part of the parameter that this rank keeps between passes."""
    part: Tensor = getattr(parameter, "ds_tensor", parameter)
    return part
