"""New ids: 128 random bits from a generator that the operating system seeds once.

Ids give no access (keys do), so they may be predictable, and a new id needs no system call.
"""

from random import Random

_random = Random()


def new_id() -> str:
    return f"{_random.getrandbits(128):032x}"
