"""The images of a micro-batch as inputs of the model: pixels, places, and positions in three axes.

PNG ─ the model's processor, without resizing ─▶ pixels ─ vision tower ─▶ embeddings at the recorded pads
"""

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trainer_service.model.settings import ModelSettings
from trainer_service.rows.row_images import ImageRule, RowImage, within
from trainer_service.rows.rows import MicroBatch

READ = frozenset({"qwen3_vl", "qwen3_vl_moe"})
"""The model types whose images are trained: those for which the engine's log-probabilities are reproduced."""


def reads_images(path: Path) -> bool:
    """Whether the model in this directory is one of these types."""
    return json.loads((path / "config.json").read_bytes()).get("model_type") in READ


class ImageInputs:
    """Makes the inputs of a model for the images of rows."""

    def __init__(self, path: Path, config: Any) -> None:
        from transformers import AutoImageProcessor

        # The gateway has resized the images. With torchvision and without, resizing gives other pixels.
        self._process = AutoImageProcessor.from_pretrained(path)
        vision = config.vision_config
        self.rule = ImageRule(config.image_token_id, vision.patch_size, vision.spatial_merge_size)

    @contextmanager
    def given_to(self, model: Any, batch: MicroBatch, device: torch.device) -> Iterator[dict[str, Tensor]]:
        """The keyword arguments of a pass over the micro-batch, which must be made inside the context.

        Raises ValueError if the bytes of an image are not those that its record describes.
        """
        if not batch.images:
            yield {}
            return
        owner = _owner_of(model)
        pixels, grids_I3 = self._pixels(batch.images)
        shown_N = _places(batch)

        def at_recorded_places(*_: Any, inputs_embeds: Tensor, **__: Any) -> tuple[Tensor, None]:
            # The model's own rule takes every pad for an image, also one that was sampled.
            return shown_N.to(inputs_embeds.device)[None, :, None].expand_as(inputs_embeds), None

        owner.get_placeholder_mask = at_recorded_places
        try:
            yield {
                "pixel_values": pixels.to(device),
                "image_grid_thw": grids_I3.to(device),
                "position_ids": _positions(owner, batch).to(device),
            }
        finally:
            del owner.get_placeholder_mask

    def _pixels(self, images: Sequence[RowImage]) -> tuple[Tensor, Tensor]:
        """The patches of all images, and their grids."""
        opened = [Image.open(io.BytesIO(image.png)).convert("RGB") for image in images]
        made = self._process(images=opened, do_resize=False, return_tensors="pt")
        grids_I3 = torch.as_tensor(made["image_grid_thw"])
        recorded = [list(image.place.grid) for image in images]
        if grids_I3.tolist() != recorded:
            raise ValueError(
                f"images of the grids {recorded} were recorded, and these have {grids_I3.tolist()}"
            )
        return torch.as_tensor(made["pixel_values"]), grids_I3


def _places(batch: MicroBatch) -> Tensor:
    """[N] bool: which tokens are pads of an image."""
    shown_N = np.zeros(len(batch.ids_N), np.bool_)
    for image in batch.images:
        shown_N[image.place.start : image.place.end] = True
    return torch.from_numpy(shown_N)


def _positions(owner: Any, batch: MicroBatch) -> Tensor:
    """[4, 1, N]: the position of each token in its row, then those in time, height and width."""
    rows = []
    ends_S = batch.lengths_S.cumsum()
    shown_N = _places(batch)
    for end, length in zip(ends_S.tolist(), batch.lengths_S.tolist(), strict=True):
        images = within(batch.images, end - length, end)
        grids = torch.tensor([image.place.grid for image in images]) if images else None
        ids_1L = torch.from_numpy(batch.ids_N[end - length : end])[None]
        kinds_1L = shown_N[end - length : end].to(torch.int32)[None]
        positions_31L, _ = owner.get_rope_index(ids_1L, kinds_1L, image_grid_thw=grids)
        rows.append(positions_31L)
    return torch.cat([torch.from_numpy(batch.positions_N)[None, None], torch.cat(rows, 2)])


def _owner_of(model: Any) -> Any:
    """The part of the model that puts the embeddings of images in their places."""
    return next(each for each in model.modules() if hasattr(each, "get_placeholder_mask"))


def image_inputs_of(model: Any, settings: ModelSettings, ranks: int) -> ImageInputs | None:
    """The inputs for the model's images; None if it reads none, or if its settings allow none.

    Several ranks allow none: a rank whose rows show no image has no gradients of the vision tower, and ZeRO
    adds up the flat gradients of ranks that then differ in their content.

    Raises SystemExit for settings with which no image model can be trained.
    """
    if not reads_images(settings.model_path):
        return None
    if settings.sharding_stage == 3:
        raise SystemExit("trainer.zero_stage: models that read images are trained with stage 2 at most")
    if settings.sequence_parallel > 1:
        raise SystemExit("trainer.sequence_parallel: models that read images are trained with 1 only")
    return (
        None if settings.critic is not None or ranks > 1 else ImageInputs(settings.model_path, model.config)
    )
