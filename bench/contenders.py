"""Different implementations of one optimizer step on the same rollouts: forward, loss, backward, clip, AdamW.

python -m bench.contenders ours|packed|padded|padded-globally WORKLOAD MODEL ROLLOUTS

Makes a step after a small one. All but `ours` are plain torch with the loss of the trainer's default preset.
All have the same gradient, and print its norm."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from bench.measuring import print_step, timed
from bench.policies import rows_of
from bench.rollouts import SyntheticRollout, read, small
from bench.workloads import WORKLOADS, Workload
from trainer_service.model.deepspeed_policy import DeepSpeedPolicy
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import load_model
from trainer_service.model.optimizer import schedule_of
from trainer_service.model.packed_attention import packing_of
from trainer_service.model.settings import OptimizerSettings
from trainer_service.rows.rows import micro_batches
from trainer_service.settings import TrainerSettings
from trainer_service.step.optimizer_step import OptimizerSteps
from trainer_service.step.step_parts import StepRequest

CPU = torch.device("cpu")
ROWS_AT_ONCE = 4
"""Rows of a padded micro-batch. Without activation checkpointing, 24 GiB are not enough for TRL's default of
8."""
WARM_UP_ROWS = 64
"""The rows of the small step."""
SETTINGS = OptimizerSettings()


class Ours:
    """The trainer's own step, with its defaults but for the workload's type and size of micro-batches:
    DeepSpeed, one rank."""

    def __init__(self, model: Path, workload: Workload) -> None:
        settings = TrainerSettings.model_validate(
            {
                "model_path": model,
                "device": "cpu",
                "threads": 1,
                "dtype": workload.dtype,
                "algorithm": {"max_tokens": workload.micro_batch_tokens},
            }
        )
        self.zero_stage = settings.sharding_stage
        self._policy, self._algorithm = DeepSpeedPolicy(settings), settings.algorithm

    def step(self, rollouts: list[SyntheticRollout]) -> float:
        """Make a step. Returns the norm of the gradient before clipping."""
        return OptimizerSteps(self._policy).step(StepRequest(rows_of(rollouts), 0, self._algorithm))[
            "grad_norm"
        ]


class PlainTorch(ABC):
    """A step with plain torch. If the model has bfloat16 weights, the optimizer has a copy of them in
    float32, as the trainer does: gradients are added up in float32, and the updated copy is rounded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._weights = list(model.parameters())
        self._copies = [self._copy(each) for each in self._weights]
        betas = (SETTINGS.beta1, SETTINGS.beta2)
        self._optimizer = torch.optim.AdamW(
            self._copies, lr=SETTINGS.lr, betas=betas, weight_decay=SETTINGS.weight_decay, fused=True
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, schedule_of(SETTINGS))

    @staticmethod
    def _copy(weight: Tensor) -> Tensor:
        """The weight in float32: itself, or a copy to which its gradients are added."""
        if weight.dtype is torch.float32:
            return weight
        copy = weight.detach().float().requires_grad_()

        def add(weight: Tensor) -> None:
            assert weight.grad is not None  # noqa: S101 - torch calls this with a gradient
            copy.grad = weight.grad.float() if copy.grad is None else copy.grad.add_(weight.grad)
            weight.grad = None

        weight.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        return copy

    def step(self, rollouts: list[SyntheticRollout]) -> float:
        """Make a step. Returns the norm of the gradient before clipping."""
        trained = sum(sum(rollout.trained) for rollout in rollouts)
        for loss in self.losses(rollouts):
            (loss / trained).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._copies, SETTINGS.max_grad_norm)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        for weight, copy in zip(self._weights, self._copies, strict=True):
            if weight is not copy:
                weight.data.copy_(copy.data)
        return float(norm)

    @abstractmethod
    def losses(self, rollouts: list[SyntheticRollout]) -> Iterator[Tensor]:
        """The loss of each micro-batch, summed over its tokens."""


class Packed(PlainTorch):
    """The trainer's attention and log-probabilities without DeepSpeed, and without shared prefixes. Where no
    rows share one, the trainer cannot be faster."""

    def __init__(self, model: Path, workload: Workload) -> None:
        super().__init__(load_model(model, getattr(torch, workload.dtype)))
        self._micro_batch_tokens = workload.micro_batch_tokens

    def losses(self, rollouts: list[SyntheticRollout]) -> Iterator[Tensor]:
        for batch in micro_batches(rows_of(rollouts), self._micro_batch_tokens):
            lp_T, *_ = scores(self.model, batch, packing_of(self.model), CPU)
            yield loss_of(lp_T, torch.from_numpy(batch.logprobs_T), torch.from_numpy(batch.advantages_T))


class Padded(PlainTorch):
    """Rows sorted by length, padded to the longest row of their micro-batch. With `globally`, they are
    padded to the longest row of the step."""

    def __init__(self, model: Path, globally: bool) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
        self._globally = globally

    def losses(self, rollouts: list[SyntheticRollout]) -> Iterator[Tensor]:
        longest = max(map(len, rollouts)) if self._globally else 0
        by_length = sorted(rollouts, key=len)
        for start in range(0, len(by_length), ROWS_AT_ONCE):
            some = by_length[start : start + ROWS_AT_ONCE]
            ids_BL = padded([torch.tensor(r.prompt + r.completion) for r in some], longest)
            seen_BL = padded([torch.ones(len(r), dtype=torch.int64) for r in some], longest)
            mask_BL = padded([torch.tensor([0] * len(r.prompt) + r.trained) for r in some], longest)
            lp_roll_BL = padded([torch.tensor([0.0] * len(r.prompt) + r.logprobs) for r in some], longest)
            logits_BLV = self.model(input_ids=ids_BL, attention_mask=seen_BL, use_cache=False).logits
            lp_N = -cross_entropy(logits_BLV[:, :-1].flatten(0, 1), ids_BL[:, 1:].flatten(), reduction="none")
            trained_N = mask_BL[:, 1:].flatten() == 1
            advantages_BL = torch.tensor([r.advantage for r in some])[:, None].expand_as(ids_BL)
            yield loss_of(
                lp_N[trained_N],
                lp_roll_BL[:, 1:].flatten()[trained_N],
                advantages_BL[:, 1:].flatten()[trained_N],
            )


def padded(rows: list[Tensor], longest: int) -> Tensor:
    """[B, L]: the rows padded with zeros on the right, to `longest` or to the longest row if that is
    longer."""
    padded_BL = pad_sequence(rows, batch_first=True)
    return torch.nn.functional.pad(padded_BL, (0, max(0, longest - padded_BL.shape[1])))


def loss_of(lp_T: Tensor, lp_roll_T: Tensor, advantages_T: Tensor) -> Tensor:
    """The sum over T tokens of PPO's loss in its first step, with truncated importance weights."""
    ratio_T = (lp_T - lp_T.detach()).exp()
    clipped_T = ratio_T.clamp(0.8, 1.28)
    weight_T = (lp_T.detach() - lp_roll_T).exp().clamp(max=2.0)
    return -(weight_T * torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)).sum()


def contender(name: str, workload: Workload, model: Path) -> Ours | PlainTorch:
    match name:
        case "ours":
            return Ours(model, workload)
        case "packed":
            return Packed(model, workload)
    return Padded(model, globally=name == "padded-globally")


def main(arguments: list[str]) -> None:
    name, workload = arguments[:2]
    model, file = map(Path, arguments[2:])
    torch.set_num_threads(1)
    rollouts = read(file)
    runs = contender(name, WORKLOADS[workload], model)
    runs.step(small(rollouts[:WARM_UP_ROWS]))
    norm, cpu_s = timed(lambda: runs.step(rollouts))
    stage = {"zero_stage": runs.zero_stage} if isinstance(runs, Ours) else {}
    print_step(rollouts, cpu_s, norm, **stage)


if __name__ == "__main__":
    main(sys.argv[1:])
