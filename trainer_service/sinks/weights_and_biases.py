"""A run at Weights & Biases. The package is imported where a deployment asks for it, and nowhere else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from trainer_service.sinks.sink import What


class WandbSettings(BaseModel):
    """Section `trainer.wandb`. The key is that of `wandb login`, or WANDB_API_KEY."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    project: str
    name: str | None = None
    """Of the run; the processes of a training that was restarted have it in common."""
    entity: str | None = None
    group: str | None = None
    """Default: `name`."""
    id: str | None = None
    """The run that every process goes on with; without it, each process is a run of its own."""
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] = "online"
    """Offline runs lie in `dir`, for `wandb sync`."""
    dir: Path = Path("run")


FINISH_S = 10.0
"""How long the end of a run waits for what is not sent yet; `wandb sync` sends the rest."""


class WeightsAndBiases:
    """`step` is the x axis of every curve, and not W&B's own count, which can never go back: a restart makes
    steps again, and an evaluation belongs to the step of its version."""

    name = "wandb"

    def __init__(self, settings: WandbSettings) -> None:
        """Raises SystemExit where the package is missing, or W&B takes no run."""
        try:
            import wandb
        except ImportError as error:
            raise SystemExit(
                "trainer.wandb is set, and the package wandb is not installed: pip install 'weir[wandb]'"
            ) from error
        settings.dir.mkdir(parents=True, exist_ok=True)
        quiet = wandb.Settings(  # figures are sent, and nothing of the machine or of its files
            console="off",
            disable_code=True,
            disable_git=True,
            finish_timeout=FINISH_S,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        try:
            self._run = wandb.init(
                project=settings.project,
                name=settings.name,
                entity=settings.entity,
                group=settings.group or settings.name,
                id=settings.id,
                resume=None if settings.id is None else "allow",
                tags=settings.tags,
                mode=settings.mode,
                dir=settings.dir,
                settings=quiet,
            )
        except wandb.Error as error:
            raise SystemExit(f"trainer.wandb: no run of project {settings.project}: {error}") from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def resume(self, step: int) -> None: ...

    def write(self, what: What, values: Mapping[str, float]) -> None:
        self._run.log(dict(values))

    def close(self) -> None:
        self._run.finish()
