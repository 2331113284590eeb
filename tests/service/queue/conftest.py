"""The fixtures of queue that these tests use."""

from tests.support.queue.fixtures import (  # noqa: F401 - pytest finds them here
    connection,
    ends,
    log,
    reader,
    redis,
    stream,
    writer,
)
