"""The fixtures of reward_service that these tests use."""

from tests.support.reward_service.fixtures import (  # noqa: F401 - pytest finds them here
    gateway,
    reward_backends,
)
