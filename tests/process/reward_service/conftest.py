"""The fixtures of reward_service that these tests use. They share a gateway, unless they turn its clock."""

from tests.support.reward_service.fixtures import gateway as own_gateway  # noqa: F401
from tests.support.reward_service.fixtures import (  # noqa: F401 - pytest finds them here
    gateway_url,
    reward_backends,
)
from tests.support.reward_service.fixtures import shared_gateway as gateway  # noqa: F401
