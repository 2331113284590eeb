"""Versions that are undone: the training went back to an older one. What they sampled is not trained."""

import msgspec


class Recovery(msgspec.Struct, frozen=True):
    """One time that the training was set back."""

    version: int
    """The new number of the restored weights."""
    restored: int
    """The version whose weights were restored. The versions between both are undone."""
    step: int
    """The last step that was made before."""
    reason: str
    automatic: bool
    """Whether a guard asked for it, and not an operator."""
    at: float
    """In seconds since 1970."""

    def undid(self, oldest: int, newest: int) -> bool:
        """Whether some of the versions from `oldest` to `newest` are undone."""
        return self.restored < newest and oldest < self.version


class RecoveryState(msgspec.Struct, frozen=True):
    """What a checkpoint stores of recoveries."""

    rate_scale: float = 1.0
    """The learning rate is this times the configured one."""
    done: list[Recovery] = []
    """The last recoveries, the newest last."""
    automatic: int = 0
    """How many recoveries guards have asked for."""
