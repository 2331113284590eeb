"""Describes how a checkpoint is sharded, and decides whether another trainer can load it."""

import msgspec


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

    def loads_into(self, own: "Layout") -> bool:
        """Whether the shards can be loaded without a conversion. Raises LayoutRefused if they cannot be
        converted either."""
        if self == own:
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


class LayoutRefused(Exception):
    """The trainer's settings do not allow to load this checkpoint."""


def _fields(lora: LoraLayout | None) -> object:
    return lora and msgspec.to_builtins(lora)
