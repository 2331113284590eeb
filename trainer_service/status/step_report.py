"""Reports each step: to the sinks and Prometheus, to `/status`, and in the log."""

import logging
import math
from collections.abc import Mapping

from rollout_queue import clock
from trainer_service.metrics import TrainerMetrics
from trainer_service.status.heartbeat import Heartbeat
from trainer_service.status.stopwatch import Stopwatch

logger = logging.getLogger(__name__)


def report_step(
    step: int,
    version: int,
    values: Mapping[str, float],
    stopwatch: Stopwatch,
    metrics: TrainerMetrics,
    heartbeat: Heartbeat,
) -> None:
    """Report that `step` made `version`. `values` are the step's metrics; the seconds of its phases are
    added."""
    place = {"step": step, "version": version, "time": clock.now()}
    values = {**place, **values, **stopwatch.laps(values["tokens"])}
    metrics.stepped(values)
    heartbeat.note(step, version, values)
    logger.info(
        "step %d made version %d: reward %.3f, %d rows, %d tokens, |dlogprob| %.2g, gradient %.3g",
        step,
        version,
        values["reward_mean"],
        values["rows"],
        values["tokens"],
        values.get("mismatch/abs_logp", math.nan),
        values["grad_norm"],
    )
