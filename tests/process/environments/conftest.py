"""The fixtures of environments that these tests use."""

from tests.support.environments.fixtures import (  # noqa: F401 - pytest finds them here
    running,
)
