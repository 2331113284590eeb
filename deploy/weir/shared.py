"""What the client library shares with the packages of the services.

In a checkout these are packages of their own. A wheel has them in the folder `_services`: there they are read
under names below `weir`, because a user's program may have a package `environments`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING or not (Path(__file__).parent / "_services").is_dir():
    from environments.errors import CONTEXT_IS_FULL, GatewayFault, RunStopped, SessionRefused, fills_context
    from environments.intervals import mean_interval
    from environments.programs.patience import PatientClient
    from environments.task_ids import id_of
    from rollout_queue import clock
else:
    from weir._services.environments.errors import (
        CONTEXT_IS_FULL,
        GatewayFault,
        RunStopped,
        SessionRefused,
        fills_context,
    )
    from weir._services.environments.intervals import mean_interval
    from weir._services.environments.programs.patience import PatientClient
    from weir._services.environments.task_ids import id_of
    from weir._services.rollout_queue import clock

__all__ = [
    "CONTEXT_IS_FULL",
    "GatewayFault",
    "PatientClient",
    "RunStopped",
    "SessionRefused",
    "clock",
    "fills_context",
    "id_of",
    "mean_interval",
]
