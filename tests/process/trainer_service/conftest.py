"""The fixtures of trainer_service that these tests use."""

from tests.support.trainer_service.device import freed_memory  # noqa: F401 - pytest finds it here
from tests.support.trainer_service.fixtures import (  # noqa: F401 - pytest finds them here
    converted_here,
    harness,
    imported,
    make_command_harness,
    make_harness,
    make_learner,
    model_path,
    pair,
    untrained,
)
