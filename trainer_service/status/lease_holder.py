"""Makes this process the only trainer: it claims the lease in Redis and renews it.

If no process holds the lease, this process starts at once. If the holder has crashed, this process starts
when the lease expires, or earlier if it sees that the holder has ended. If the holder renews the lease, this
process ends.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context

from rollout_queue import clock
from rollout_queue.contract.errors import LeaseLost, StorageUnavailable
from rollout_queue.redis import keys
from rollout_queue.redis.lease.lease import Lease
from trainer_service.status.shared_state import SharedState

logger = logging.getLogger(__name__)

ASK_EVERY_S = 0.5
ROUNDING_S = 0.05
"""The largest error of the time that Redis reports to be left. A renewal changes it by far more."""


@contextmanager
def keep_lease(lease: Lease, shared_state: SharedState, retry_s: float) -> Iterator[bool]:
    """Hold the lease inside the block; a thread renews it. Yields True if this process has the lease,
    and False if the trainer was told to stop first.

    Raises SystemExit if another trainer holds the lease and renews it.
    """
    if not _claimed(lease, shared_state, retry_s):
        yield False
        return
    logger.info("holds %s as %s", keys.LEASE, lease.holder)
    ended = threading.Event()
    keeper = threading.Thread(
        target=copy_context().run, args=(_keep, lease, ended), name="lease", daemon=True
    )
    keeper.start()
    try:
        yield True
    finally:
        ended.set()
        keeper.join()
        with suppress(StorageUnavailable):  # the lease then expires by itself
            lease.release()


def _claimed(lease: Lease, shared_state: SharedState, retry_s: float) -> bool:
    """Claim the lease; returns False if the trainer is told to stop first. A lease that its holder does not
    renew belongs to a trainer that crashed. Raises SystemExit if the holder renews it."""
    expires_at_s: float | None = None
    while not shared_state.stopping:
        asked_s = clock.monotonic()
        try:
            held = lease.claim()
        except StorageUnavailable as error:
            logger.warning("%s; trying again in %g s", error, retry_s)
            shared_state.sleep(retry_s)
            continue
        if held is None:
            return True
        if expires_at_s is None:
            expires_at_s = clock.monotonic() + held.expires_in_s
            logger.warning(
                "%s belongs to %s; unless renewed, it expires in %.1f s",
                keys.LEASE,
                held.holder,
                held.expires_in_s,
            )
        elif asked_s + held.expires_in_s > expires_at_s + ROUNDING_S:
            raise SystemExit(f"another trainer holds {keys.LEASE}: {held.holder}")
        shared_state.sleep(min(ASK_EVERY_S, held.expires_in_s + 0.01))
    return False


def _keep(lease: Lease, ended: threading.Event) -> None:
    """Renew the lease after every third of its duration. If another trainer has claimed it, this thread
    ends, and the main thread's next use of the stream raises LeaseLost."""
    while not clock.wait(ended, lease.lease_s / 3):
        try:
            lease.renew()
        except StorageUnavailable as error:
            logger.warning("%s not renewed: %s", keys.LEASE, error)
        except LeaseLost as error:
            logger.error("%s", error)
            return
