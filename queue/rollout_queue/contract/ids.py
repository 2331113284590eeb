"""New ids: 128 random bits from a generator that the operating system seeds once.

They are names and open nothing (keys do), so they need not cost a system call each.
"""

from random import Random

_random = Random()


def new_id() -> str:
    return f"{_random.getrandbits(128):032x}"
