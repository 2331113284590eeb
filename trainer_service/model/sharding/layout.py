"""Describes the run and the shards of a checkpoint, and decides whether another trainer can load it."""

import msgspec

NEW_RUN = (
    "go on as it began, or begin a new run with a checkpoint directory and a Redis of its own "
    "(`weir up --run-dir DIR`)"
)


class LoraLayout(msgspec.Struct, frozen=True):
    """The LoRA adapters of a checkpoint: the fields of `LoraSettings` that decide what is trained."""

    rank: int
    alpha: float
    target_modules: str | list[str]


class Layout(msgspec.Struct, frozen=True):
    """How a checkpoint is sharded. If the loading trainer has another number of ranks or ZeRO stage, the
    checkpoint is converted. All other fields must be equal."""

    ranks: int
    zero_stage: int
    dtype: str
    lora: LoraLayout | None = None
    """None without adapters."""
    critic: bool = False
    """Whether the checkpoint holds a critic."""
    source: str = ""
    """The `trainer.source` of its run. Older checkpoints name neither it nor their base model."""
    base_digest: str = ""
    """Which base model its run has."""

    def loads_into(self, own: "Layout") -> bool:
        """Whether the shards can be loaded without a conversion. Raises LayoutRefused if they cannot be
        converted either."""
        self.refuse_other_run(own)
        if msgspec.structs.replace(self, source=own.source, base_digest=own.base_digest) == own:
            return True
        if self.dtype != own.dtype:
            raise LayoutRefused(f"it was trained with trainer.dtype {self.dtype}, not {own.dtype}")
        if self.lora != own.lora:
            theirs, ours = _fields(self.lora), _fields(own.lora)
            raise LayoutRefused(f"it was trained with trainer.lora {theirs}, not {ours}")
        if self.critic != own.critic:
            raise LayoutRefused(f"it was trained with{'' if self.critic else 'out'} trainer.critic")
        if self.critic:
            raise LayoutRefused(
                f"its critic was saved by {self.ranks} ranks at trainer.zero_stage {self.zero_stage}, and a "
                "critic's shards are not converted"
            )
        if self.zero_stage == own.zero_stage == 0:
            return True  # every rank has all weights
        if 0 in (self.zero_stage, own.zero_stage):
            raise LayoutRefused(
                f"it was saved at trainer.zero_stage {self.zero_stage}, not {own.zero_stage}: "
                "DeepSpeed converts between stages 1, 2 and 3 only"
            )
        return False

    def refuse_other_run(self, own: "Layout") -> None:
        """Raises LayoutRefused if the checkpoint is of a run with another base model or another source."""
        if "" not in (self.base_digest, own.base_digest) and self.base_digest != own.base_digest:
            raise LayoutRefused(f"it was made from another model than trainer.model_path: {NEW_RUN}")
        if "" not in (self.source, own.source) and self.source != own.source:
            raise LayoutRefused(f"it was made with trainer.source {self.source}, not {own.source}: {NEW_RUN}")


class LayoutRefused(Exception):
    """The trainer's settings do not allow to load this checkpoint."""


def _fields(lora: LoraLayout | None) -> object:
    return lora and msgspec.to_builtins(lora)
