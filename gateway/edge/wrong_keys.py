"""Slows down whoever tries keys: a wrong key beyond the limits gets a late 429 in place of a 401.

The key is checked first. So a caller with a valid key is never refused because somebody else guesses, also
behind a proxy, where all have one address. A guess costs time on a connection, and connections are bounded
(`gateway.connections`). Each process counts for itself.
"""

import ipaddress
import math
from collections import OrderedDict

from gateway.settings import WrongKeySettings
from rollout_queue import clock
from rollout_queue.http.errors import ApiError

ADDRESSES = 10_000
"""How many addresses are remembered: those that tried last."""
WINDOW_S = 60.0
NETWORK_BITS = 64
"""One subscriber has at least so much of IPv6, so its addresses count as one."""


class WrongKeys:
    """Counts the wrong keys of each address, and of all."""

    def __init__(self, settings: WrongKeySettings) -> None:
        self._settings = settings
        self._full_at: OrderedDict[str, float] = OrderedDict()
        """By address, when its whole allowance is there again; the one that tried last is last."""
        self._all_full_at = 0.0

    @property
    def remembered(self) -> int:
        """How many addresses are remembered."""
        return len(self._full_at)

    async def refusal(self, address: str) -> ApiError | None:
        """Count a wrong key. Returns the error that it gets in place of a 401, after a delay, or None."""
        settings, now, name = self._settings, clock.monotonic(), _counted_as(address)
        own_at = _spent(self._full_at.get(name, now), now, settings.per_address)
        all_at = _spent(self._all_full_at, now, settings.in_all)
        if own_at - now <= WINDOW_S and all_at - now <= WINDOW_S:
            self._all_full_at = all_at
            self._remember(name, own_at)
            return None
        wait_s = max(own_at, all_at) - now - WINDOW_S
        await clock.sleep(settings.delay_s)  # the guesser waits; other connections do not
        message = "too many wrong keys came from your address, or in all; a valid key is accepted"
        # SDKs do not send such a request again.
        headers = {"retry-after": str(math.ceil(wait_s)), "x-should-retry": "false"}
        return ApiError(429, message, code="wrong_keys", headers=headers)

    def _remember(self, name: str, full_at: float) -> None:
        self._full_at[name] = full_at
        self._full_at.move_to_end(name)
        if len(self._full_at) > ADDRESSES:
            self._full_at.popitem(last=False)


def _spent(full_at: float, now: float, per_window: int) -> float:
    """When a bucket of `per_window` tokens that was full at `full_at` is full again, with one token less."""
    return max(full_at, now) + WINDOW_S / per_window


def _counted_as(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # a socket file, or a test
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((int(found), NETWORK_BITS), strict=False))
    return address
