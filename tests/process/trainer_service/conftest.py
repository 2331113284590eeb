"""The fixtures of trainer_service that these tests use."""

from tests.support.queue.fixtures import redis  # noqa: F401 - pytest finds it here
from tests.support.trainer_service.device import (  # noqa: F401 - pytest finds them here
    freed_memory,
    sparing_environment,
)
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
