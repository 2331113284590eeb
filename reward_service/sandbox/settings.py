"""The settings `rewards.python`: the limits of Python graders."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class PythonSettings(BaseModel):
    """Limits of each process that runs a Python grader, and of their number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    interpreter: str | None = None
    """The Python whose libraries the graders may import; null means the service's own."""
    processes: int = Field(4, ge=1)
    """How many run at once; further ones wait."""
    timeout_s: float = Field(30.0, gt=0)
    memory_bytes: int = Field(2**30, ge=2**26)
    file_bytes: int = Field(2**26, ge=0)
    """The largest file that a grader may write."""
    isolation: Literal["auto", "required"] = "auto"
    """auto: graders have no network, and see no process of the machine, where the system grants namespaces.
    required: where it does not, a Python grader fails."""
    from_clients: bool = False
    """Whether requests with a client key may bring Python graders. An admin's requests may. Then isolation is
    required, and the service does not start without it."""

    @property
    def required(self) -> bool:
        """Whether a grader that cannot be isolated fails."""
        return self.isolation == "required" or self.from_clients
