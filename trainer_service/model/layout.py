"""How a checkpoint is cut into shards: what a trainer must know before it loads one."""

from typing import Any

import msgspec


class Layout(msgspec.Struct, frozen=True):
    """Ranks and stage may differ from the trainer's: the checkpoint is converted. The rest may not."""

    ranks: int
    zero_stage: int
    dtype: str
    lora: dict[str, Any] | None = None
    critic: bool = False
    """Whether one learned beside the policy."""

    def loads_into(self, own: "Layout") -> bool:
        """Whether the shards are `own`'s as they are. Raises LayoutRefused where no conversion helps."""
        if self == own:
            return True
        if self.dtype != own.dtype:
            raise LayoutRefused(f"it was trained with trainer.dtype {self.dtype}, not {own.dtype}")
        if self.lora != own.lora:
            raise LayoutRefused(f"it was trained with trainer.lora {self.lora}, not {own.lora}")
        if self.critic != own.critic:
            raise LayoutRefused(f"it was trained with{'' if self.critic else 'out'} trainer.critic")
        if self.critic:
            raise LayoutRefused(
                f"it has a critic, of {self.ranks} ranks at trainer.zero_stage {self.zero_stage}: those of a "
                "critic are not converted"
            )
        if self.zero_stage == own.zero_stage == 0:
            return True  # every rank has everything
        if 0 in (self.zero_stage, own.zero_stage):
            raise LayoutRefused(
                f"it was saved at trainer.zero_stage {self.zero_stage}, not {own.zero_stage}: "
                "DeepSpeed converts between stages 1, 2 and 3 only"
            )
        return False


class LayoutRefused(Exception):
    """A checkpoint that this trainer's settings cannot take up."""
