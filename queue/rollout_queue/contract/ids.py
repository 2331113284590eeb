"""New ids: 128 random bits from a generator that the operating system seeds once.

Ids give no access (keys do), so they need not be unpredictable, and no id costs a system call.
"""

from random import Random

_random = Random()


def new_id() -> str:
    return f"{_random.getrandbits(128):032x}"
