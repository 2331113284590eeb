"""The model that learns: a DeepSpeed engine around a Hugging Face model.

MicroBatch ─ logprobs ─▶ loss ─ backward ─▶ (more of them) ─ step ─▶ new weights ─ export ─▶ safetensors
"""

import math
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer_service.batch import MicroBatch
from trainer_service.diagnostics import Observed
from trainer_service.loss import selected_logprobs
from trainer_service.settings import OptimizerSettings, TrainerSettings


class Policy:
    """The weights, their optimizer and schedule. One per process; several ranks hold one each."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        deepspeed = prepare_deepspeed(settings)
        model = load_model(settings.model_path, getattr(torch, settings.dtype))
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._published_dtypes = tensor_dtypes(settings.model_path)
        optimizer = make_optimizer(model, settings.optimizer)
        warmup = settings.optimizer.warmup_steps
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: min(1.0, (step + 1) / max(1, warmup))
            ),
            config=deepspeed_config(settings),
        )
        self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        # Dropout would make the trainer's logprobs another policy's than the engine's: never train().
        self._engine.module.eval()

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """log p [T] of the trained tokens under the present weights, with gradient, and the entropies [T].

        Hidden states are picked before the head, so that logits exist for trained tokens only. There is no
        attention mask: the model keeps packed rows apart because positions start again at 0.
        """
        return self._forward(self._engine, batch)

    def _forward(self, model: Any, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        logits_1TV = model(
            input_ids=self.tensor(batch.ids_N)[None],
            position_ids=self.tensor(batch.positions_N)[None],
            logits_to_keep=self.tensor(batch.predict_at_T),
            use_cache=False,
        ).logits
        targets_T, temperatures_T = self.tensor(batch.targets_T), self.tensor(batch.temperatures_T)
        return selected_logprobs(logits_1TV[0], targets_T, temperatures_T)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's share of the step's loss. DeepSpeed averages over ranks, and
        the share is of a sum over all of them."""
        self._engine.backward(loss * self.ranks, scale_wrt_gas=False)

    def step(self) -> float:
        """Update the weights. Returns the norm of the gradient before it was clipped."""
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return float(norm) if norm is not None else float("nan")

    def gradient_norm(self, batch: MicroBatch, loss_of: Callable[[Tensor], Tensor]) -> float:
        """The norm of the gradient of what `loss_of` makes of the logprobs. It is added to nothing: DeepSpeed
        neither hears of the pass, nor do the other ranks."""
        logprobs_T, _ = self._forward(self._engine.module, batch)
        parameters = [each for each in self._engine.module.parameters() if each.requires_grad]
        gradients = torch.autograd.grad(loss_of(logprobs_T), parameters, allow_unused=True)
        norms = [torch.linalg.vector_norm(each.float()) for each in gradients if each is not None]
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def finite(self) -> bool:
        """Whether every weight is a number."""
        return all(bool(each.isfinite().all()) for each in self._engine.module.parameters())

    def share(self, batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]:
        """This rank's micro-batches, as many as every rank has; False for one that is there for the number
        alone. Ranks reduce their gradients together, so none may have a pass more than another."""
        most = math.ceil(len(batches) / self.ranks)
        own = [(batch, True) for batch in batches[self.rank :: self.ranks]]
        return own + [(batches[0], False)] * (most - len(own))

    def gathered(self, seen: list[Observed]) -> list[Observed]:
        """What all ranks saw, on rank 0; nothing on the others."""
        if self.ranks == 1:
            return seen
        everybody: list[list[Observed]] | None = [[]] * self.ranks if self.rank == 0 else None
        torch.distributed.gather_object([each.cpu() for each in seen], everybody)
        return [observed for part in everybody or [] for observed in part]

    def tensor(self, values: Any) -> Tensor:
        return torch.from_numpy(values).to(self._engine.device)

    def export(self, path: Path) -> None:
        """Write the weights as the base model has them: same names, same dtypes, a tied tensor once."""
        state: dict[str, Tensor] = self._engine.module.state_dict()
        tied = set(getattr(self._engine.module, "all_tied_weights_keys", {}))
        names = [name for name in state if name not in tied]
        if missing := set(names) - set(self._published_dtypes):
            raise ValueError(f"{self._settings.model_path} has no tensor {sorted(missing)[0]}")
        tensors = {
            name: state[name].detach().to("cpu", self._published_dtypes[name]).contiguous() for name in names
        }
        save_file(tensors, path, metadata={"format": "pt"})

    def save(self, directory: Path, tag: str) -> None:
        """Write weights, optimizer, schedule and the random generators' states below `directory`/`tag`."""
        self._engine.save_checkpoint(
            str(directory), tag=tag, client_state={"random": random_states()}, save_latest=False
        )
        torch.distributed.barrier()  # DeepSpeed returns on one rank before another has written its shard

    def load(self, directory: Path, tag: str) -> None:
        path, client_state = self._engine.load_checkpoint(str(directory), tag=tag)
        if path is None:
            raise FileNotFoundError(f"DeepSpeed found no checkpoint {tag} in {directory}")
        restore_random_states(client_state["random"])
        self._engine.module.eval()


def deepspeed_config(settings: TrainerSettings) -> dict[str, Any]:
    return {
        # Required, and without meaning here: micro-batches are ragged, step() says where a step ends.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": settings.zero_stage, "overlap_comm": False},
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "gradient_clipping": settings.optimizer.max_grad_norm,
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
    random.seed(settings.seed)
    np.random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    module: ModuleType = deepspeed
    return module


def load_model(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")


def make_optimizer(model: Any, settings: OptimizerSettings) -> torch.optim.AdamW:
    """Fused AdamW: as quick as DeepSpeed's own, and nothing to compile at start."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )


def tensor_dtypes(directory: Path) -> dict[str, torch.dtype]:
    """Name and dtype of every tensor in a directory's safetensors files."""
    dtypes: dict[str, torch.dtype] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                dtypes[name] = getattr(torch, SAFETENSORS_DTYPES[file.get_slice(name).get_dtype()])
    if not dtypes:
        raise FileNotFoundError(f"{directory} holds no safetensors weights")
    return dtypes


SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def random_states() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
