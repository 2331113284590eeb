"""The fixtures of gateway that these tests use."""

from tests.support.gateway.fixtures import (  # noqa: F401 - pytest finds them here
    backends,
    deploy,
    gated,
    gateway,
    gateway_url,
    own_backends,
    pad,
    retry_counts,
    seeing,
    tokens,
    trainer,
    vision_model,
)
