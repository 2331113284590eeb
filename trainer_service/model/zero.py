"""DeepSpeed as the trainer uses it: import, process group, configuration, and weights that are shared out."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from trainer_service.settings import TrainerSettings


def deepspeed_config(settings: TrainerSettings) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": settings.zero_stage, "overlap_comm": False}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        # Required, and without meaning here: micro-batches are ragged, step() says where a step ends.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        # Else an offloaded optimizer must be DeepSpeed's own, which is compiled at start.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        # At stage 0 the optimizer clips by itself: see ClippingAdamW.
        "gradient_clipping": settings.optimizer.max_grad_norm if settings.zero_stage else 0.0,
        "steps_per_print": 1_000_000_000,
    }


def prepare_deepspeed(settings: TrainerSettings) -> ModuleType:
    """Import DeepSpeed for the device at hand and join the process group, alone unless a launcher set one."""
    cpu = settings.device == "cpu" or (settings.device == "auto" and not torch.cuda.is_available())
    if cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    import deepspeed
    from torch._C._distributed_c10d import HashStore

    # On CPU, DeepSpeed compiles a shared-memory all-reduce at start, for which an image would need gcc and
    # ninja. Training never calls it (it serves inference_all_reduce), so it is left out. A private name of
    # the pinned release; `import deepspeed.comm.torch` would resolve to the real torch.
    comm: Any = sys.modules["deepspeed.comm.torch"]
    comm.build_shm_op = lambda: None
    backend = "gloo" if cpu else "nccl"
    if not torch.distributed.is_initialized() and "WORLD_SIZE" not in os.environ:
        torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    module: ModuleType = deepspeed
    return module


@contextmanager
def whole(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Within, every rank has all of these weights. Every rank has to ask for them, in the same order: at
    stage 3 each has a part."""
    parted = [each for each in parameters if hasattr(each, "ds_id")]
    if not parted:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parted):
        yield


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of all of it, whatever part this rank has."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def own_part(parameter: Tensor) -> Tensor:
    """What this rank keeps of it between passes."""
    part: Tensor = getattr(parameter, "ds_tensor", parameter)
    return part
