"""The fixtures of gateway that these tests use."""

from tests.support.gateway.fixtures import (  # noqa: F401 - pytest finds them here
    backends,
    gateway,
    gateway_url,
)
