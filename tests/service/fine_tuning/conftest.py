"""The fixtures of fine_tuning that these tests use."""

from tests.support.fine_tuning.fixtures import (  # noqa: F401 - pytest finds them here
    running,
    service,
)
