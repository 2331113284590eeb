"""Writes to a run at Weights & Biases (W&B). Its package is imported only if the settings ask for it."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainer_service.settings import WandbSettings
from trainer_service.sinks.json_lines import last_points
from trainer_service.sinks.sink import PointKind

logger = logging.getLogger(__name__)


AWAY_S = 30.0
"""How long the start waits for W&B. After that, the run is written to this machine's disk."""
FINISH_S = 10.0
"""How long the end of a run waits until everything is sent; `wandb sync` sends the rest."""


class WeightsAndBiases:
    """Makes the metric `step` the x axis of every curve. W&B's own counter never goes back, but a restarted
    trainer repeats steps, and an evaluation belongs to the earlier step that made its version."""

    name = "wandb"

    def __init__(
        self, settings: WandbSettings, algorithm: Mapping[str, Any], metrics_path: Path | None
    ) -> None:
        """`metrics_path` is the file of `JsonLines`, which has every point.

        Raises SystemExit if the package or the key is missing, or W&B refuses the run. If W&B cannot be
        reached, the run is offline."""
        try:
            import wandb
        except ImportError as error:
            raise SystemExit(
                "trainer.wandb is set, but the package wandb is not installed: pip install 'weir[wandb]'"
            ) from error
        self._metrics_path = metrics_path
        settings.dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run = _start_run(settings, settings.mode, algorithm)
        except wandb.errors.AuthenticationError as error:
            raise SystemExit(f"trainer.wandb: {error}") from error
        except wandb.errors.CommError as error:
            logger.warning(
                "W&B cannot be reached; this run is written to %s for `wandb sync`: %s", settings.dir, error
            )
            self._run = _start_run(settings, "offline", algorithm)
        except wandb.Error as error:
            raise SystemExit(
                f"trainer.wandb: cannot start a run in project {settings.project}: {error}"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def resume(self, step: int) -> None:
        """Write the last points up to `step` again: W&B held some of them in memory, which a process that is
        killed loses."""
        for kind, values in last_points(self._metrics_path, step) if self._metrics_path is not None else ():
            self.write(kind, values)

    def write(self, kind: PointKind, values: Mapping[str, float]) -> None:
        self._run.log(dict(values))

    def close(self) -> None:
        self._run.finish()


def _start_run(
    settings: WandbSettings, mode: Literal["online", "offline"], algorithm: Mapping[str, Any]
) -> Any:
    import wandb

    quiet = wandb.Settings(  # nothing about the machine or its files is sent
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
