"""A run at Weights & Biases. The package is imported where a deployment asks for it, and nowhere else."""

import logging
from collections.abc import Mapping
from typing import Any, Literal

from trainer_service.settings import WandbSettings
from trainer_service.sinks.sink import What

logger = logging.getLogger(__name__)


AWAY_S = 30.0
"""How long a start waits for W&B, before the run is kept on this machine."""
FINISH_S = 10.0
"""How long the end of a run waits for what is not sent yet; `wandb sync` sends the rest."""


class WeightsAndBiases:
    """`step` is the x axis of every curve, and not W&B's own count, which can never go back: a restart makes
    steps again, and an evaluation belongs to the step of its version."""

    name = "wandb"

    def __init__(self, settings: WandbSettings, algorithm: Mapping[str, Any]) -> None:
        """Raises SystemExit where the package or the key is missing, or W&B takes no run. Where nobody can
        be reached, the run is an offline one."""
        try:
            import wandb
        except ImportError as error:
            raise SystemExit(
                "trainer.wandb is set, and the package wandb is not installed: pip install 'weir[wandb]'"
            ) from error
        settings.dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run = _begun(settings, settings.mode, algorithm)
        except wandb.errors.AuthenticationError as error:
            raise SystemExit(f"trainer.wandb: {error}") from error
        except wandb.errors.CommError as error:
            logger.warning("W&B is away; %s keeps this run for `wandb sync`: %s", settings.dir, error)
            self._run = _begun(settings, "offline", algorithm)
        except wandb.Error as error:
            raise SystemExit(f"trainer.wandb: no run of project {settings.project}: {error}") from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def resume(self, step: int) -> None: ...

    def write(self, what: What, values: Mapping[str, float]) -> None:
        self._run.log(dict(values))

    def close(self) -> None:
        self._run.finish()


def _begun(settings: WandbSettings, mode: Literal["online", "offline"], algorithm: Mapping[str, Any]) -> Any:
    import wandb

    quiet = wandb.Settings(  # figures are sent, and nothing of the machine or of its files
        console="off",
        disable_code=True,
        disable_git=True,
        finish_timeout=FINISH_S,
        init_timeout=AWAY_S,
        silent=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    return wandb.init(
        project=settings.project,
        name=settings.name,
        entity=settings.entity,
        group=settings.group or settings.name,
        id=settings.id,
        resume=None if settings.id is None else "allow",
        tags=settings.tags,
        mode=mode,
        config={"algorithm": dict(algorithm)},
        dir=settings.dir,
        settings=quiet,
    )
