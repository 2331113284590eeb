"""Finds out at the start whether Python graders can be isolated: whether the system grants namespaces."""

import json
import logging
import subprocess
import sys
from typing import Final

from reward_service.sandbox.process import CHILD, ENVIRONMENT
from reward_service.sandbox.settings import PythonSettings

logger = logging.getLogger(__name__)

STARTS_WITHIN_S = 60.0
GIVEN: Final[dict[str, object]] = {
    "source": "def grade(sample, item): return 1.0",
    "sample": {},
    "item": None,
}
WITHOUT = "the system grants no namespaces, so Python graders would have the network and see other processes"


def isolates(settings: PythonSettings, section: str) -> bool:
    """Whether graders are isolated. Logs it once if they are not. `section`: of the configuration.

    Raises SystemExit if clients may bring graders that would not be isolated.
    """
    found = _tried(settings)
    if not found and settings.from_clients:
        raise SystemExit(
            f"{section}.python.from_clients: {WITHOUT}; unset it, or grant namespaces to the service"
        )
    if not found:
        logger.warning("%s.python.isolation: %s", section, WITHOUT)
    return found


def _tried(settings: PythonSettings) -> bool:
    """Whether a grader that does nothing runs isolated."""
    limits = {
        "cpu_s": int(STARTS_WITHIN_S),
        "memory_bytes": settings.memory_bytes,
        "file_bytes": settings.file_bytes,
        "isolation": "required",
    }
    command = [settings.interpreter or sys.executable, "-I", "-B", str(CHILD), json.dumps(limits)]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(GIVEN).encode(),
            capture_output=True,
            env=ENVIRONMENT,
            timeout=STARTS_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
