"""The fixtures of page that these tests use."""

from tests.support.page.fixtures import (  # noqa: F401 - pytest finds them here
    backends,
    gateway,
    gateway_url,
    page,
)
