"""Checks a model that reads images on the device against float32 on CPU."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.gpu.checks import Check, at_most
from bench.gpu.kernels import LOGPROBS
from bench.policies import row_of
from bench.rollouts import SyntheticRollout
from rollout_queue.contract.records import TurnImage
from tests.support.images import encoded, image_of
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import load_model
from trainer_service.model.images import ImageInputs
from trainer_service.model.packed_attention import packing_of
from trainer_service.rows.row_images import ImageRule, RowImage
from trainer_service.rows.rows import Row, micro_batches

CPU = torch.device("cpu")
SIZES = ((96, 64), (64, 128), (256, 192))
"""Widths and heights in pixels."""


def images(device: torch.device, dtypes: Sequence[torch.dtype], path: Path) -> Iterator[Check]:
    """The checks of the model in this directory."""
    exact_T = _logprobs(path, CPU, torch.float32)
    for dtype in dtypes:
        found_T = _logprobs(path, device, dtype)
        what = f"{str(dtype).removeprefix('torch.')}: |Δlogprob| of rows with images to float32 on CPU, mean"
        yield at_most(what, float((exact_T - found_T).abs().mean()), LOGPROBS[dtype], " nats")


@torch.no_grad()
def _logprobs(path: Path, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    model = load_model(path, dtype).eval().to(device)
    inputs = ImageInputs(path, model.config)
    (batch,) = micro_batches(image_rows(inputs.rule), 10_000)
    lp_T, *_ = scores(model, batch, packing_of(model), device, images=inputs)
    return lp_T.to(CPU)


def image_rows(rule: ImageRule) -> list[Row]:
    """A row of each number of images from none to all of `SIZES`, with an advantage of either sign."""
    return [_row(rule, number, -1.0 if number % 2 else 1.0) for number in range(len(SIZES) + 1)]


def _row(rule: ImageRule, count: int, advantage: float) -> Row:
    ids, shown = [5, 6, 7], []
    for seed, (width, height) in enumerate(SIZES[:count]):
        grid = (1, height // rule.patch, width // rule.patch)
        pads = [rule.pad] * (grid[1] * grid[2] // rule.merge**2)
        png = encoded(image_of(width, height, seed))
        place = TurnImage(
            hashlib.sha256(png).hexdigest(), len(ids), len(ids) + len(pads), width, height, grid
        )
        shown.append(RowImage(place, png))
        ids += [*pads, 8 + seed]
    answer = np.random.default_rng(count).integers(20, 500, 40).tolist()
    row = row_of(SyntheticRollout(ids, answer, advantage, []), f"images-{count}")
    return replace(row, images=tuple(shown))
