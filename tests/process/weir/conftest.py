"""The fixtures of weir that these tests use."""

from tests.support.weir.fixtures import (  # noqa: F401 - pytest finds them here
    fake_service,
    notes,
    settings,
    unused_ports,
)
