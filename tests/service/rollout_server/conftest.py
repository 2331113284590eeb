"""The fixtures of rollout_server that these tests use."""

from tests.support.rollout_server.fixtures import (  # noqa: F401 - pytest finds them here
    harness,
)
