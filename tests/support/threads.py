"""Work that goes on in threads while a block runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread


@contextmanager
def meanwhile(over: Event, *work: Callable[[], object]) -> Iterator[None]:
    """At the end of the block `over` is set, and each work is awaited."""
    threads = [Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
