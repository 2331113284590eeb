"""What is known of a model that can be trained, and what a checkpoint stores of it.

gradient?   no ── forward_backward ─▶ yes ── optim_step, load_weights ─▶ no
progress    present ─────────────── the last one without a gradient ────▶ a checkpoint has this one
"""

import hashlib
import re
from dataclasses import dataclass

import msgspec

from rollout_queue.trainer_commands import LoraSpec
from trainer_service.model.checkpoint_layout import Layout

RECORD = "model.json"
"""The file with a ModelRecord, beside the files of a model's states."""
SAFE_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}")
"""Names of directories and adapters."""


class ModelProgress(msgspec.Struct, frozen=True):
    """How far a model is."""

    position: str
    """The place in the log of the last command that it contains."""
    steps: int = 0
    publications: int = 0
    """How many of its commands were to publish it, whether or not they failed. It numbers its adapters."""


class ModelRecord(msgspec.Struct, frozen=True):
    """What is stored beside the files of a model."""

    model_id: str
    base_model: str
    """The trainer's `model_path`."""
    lora: LoraSpec | None
    layout: Layout
    progress: ModelProgress
    base_digest: str = ""
    """Tells its base model from others at the same path; empty in records of older builds."""


@dataclass
class LiveModel:
    """A model in memory. It is changed only by the executor."""

    lora: LoraSpec | None
    progress: ModelProgress
    clean: ModelProgress
    """The progress at the last command after which there was no gradient. Its weights are the present ones:
    only commands that leave no gradient change weights."""
    has_gradient: bool = False
    tokens: int = 0
    """The tokens of the present gradient."""

    @classmethod
    def of(cls, record: ModelRecord) -> "LiveModel":
        return cls(record.lora, record.progress, record.progress)

    def contains(self, position: str) -> bool:
        """Whether the model contains the command at this place."""
        return place_in(position) <= place_in(self.progress.position)

    def advance(self, position: str) -> None:
        """Note that the model contains the command at this place."""
        self.progress = msgspec.structs.replace(self.progress, position=position)
        if not self.has_gradient:
            self.clean, self.tokens = self.progress, 0

    def stored(self, position: str) -> ModelProgress:
        """The progress that a checkpoint has, made when every model contains its commands up to this place.
        While commands are read again, a model may be further."""
        if self.has_gradient or self.contains(position):
            return self.clean
        return msgspec.structs.replace(self.progress, position=position)


def place_in(position: str) -> tuple[int, ...]:
    """A position as numbers, which are in the order of the log."""
    return tuple(int(part) for part in position.split("-"))


def safe_name(model_id: str) -> str:
    """A name for directories and adapters. Two models never have the same."""
    if SAFE_NAME.fullmatch(model_id):
        return model_id
    digest = hashlib.sha256(model_id.encode()).hexdigest()[:16]
    readable = re.sub(r"[^a-zA-Z0-9]+", "-", model_id).strip("-")[:40]
    return f"{readable or 'model'}.{digest}"
