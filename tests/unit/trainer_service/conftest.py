"""The fixtures of trainer_service that these tests use."""

from tests.support.trainer_service.fixtures import (  # noqa: F401 - pytest finds them here
    freed_memory,
    harness,
    imported,
    make_harness,
    model_path,
)
