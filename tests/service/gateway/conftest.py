"""The fixtures of gateway that these tests use."""

from tests.support.gateway.fixtures import (  # noqa: F401 - pytest finds them here
    backends,
    deploy,
    gated,
    gated_timed,
    gateway,
    gateway_url,
    other,
    own_backends,
    pad,
    retry_counts,
    seeing,
    seeing_url,
    timed,
    tokens,
    trainer,
    vision_model,
)
