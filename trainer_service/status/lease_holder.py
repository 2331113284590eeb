"""Makes this process the only trainer: it claims the lease in Redis and renews it.

A process starts at once where nobody holds the lease, and after its end where the holder has crashed. Where
the holder renews it, the process ends.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rollout_queue.contract.errors import LeaseLost, StorageUnavailable
from rollout_queue.redis import keys
from rollout_queue.redis.lease import Lease
from trainer_service.status.shared_state import SharedState

logger = logging.getLogger(__name__)

ASK_EVERY_S = 0.5
ROUNDING_S = 0.05
"""By how much the time that Redis says is left may be wrong. A renewal adds far more."""


@contextmanager
def keep_lease(lease: Lease, shared_state: SharedState, retry_s: float) -> Iterator[bool]:
    """Hold the lease inside the block, renewed by a thread. Yields False when told to stop before it was
    claimed.

    Raises SystemExit when another trainer holds it and renews it.
    """
    if not _claimed(lease, shared_state, retry_s):
        yield False
        return
    logger.info("holds %s as %s", keys.LEASE, lease.holder)
    ended = threading.Event()
    keeper = threading.Thread(target=_keep, args=(lease, ended), name="lease", daemon=True)
    keeper.start()
    try:
        yield True
    finally:
        ended.set()
        keeper.join()
        with suppress(StorageUnavailable):  # then the lease runs out by itself
            lease.release()


def _claimed(lease: Lease, shared_state: SharedState, retry_s: float) -> bool:
    """Returns False when told to stop. A lease that is not renewed belongs to a trainer that crashed."""
    runs_out_s: float | None = None
    while not shared_state.stopping:
        asked_s = time.monotonic()
        try:
            held = lease.claim()
        except StorageUnavailable as error:
            logger.warning("%s; trying again in %g s", error, retry_s)
            shared_state.sleep(retry_s)
            continue
        if held is None:
            return True
        if runs_out_s is None:
            runs_out_s = time.monotonic() + held.expires_in_s
            logger.warning(
                "%s is of %s; unless renewed, it runs out in %.1f s",
                keys.LEASE,
                held.holder,
                held.expires_in_s,
            )
        elif asked_s + held.expires_in_s > runs_out_s + ROUNDING_S:
            raise SystemExit(f"another trainer holds {keys.LEASE}: {held.holder}")
        shared_state.sleep(min(ASK_EVERY_S, held.expires_in_s + 0.01))
    return False


def _keep(lease: Lease, ended: threading.Event) -> None:
    """Renew three times in the life of a lease. If it is lost, the next write to the stream raises
    LeaseLost."""
    while not ended.wait(lease.lease_s / 3):
        try:
            lease.renew()
        except StorageUnavailable as error:
            logger.warning("%s not renewed: %s", keys.LEASE, error)
        except LeaseLost as error:
            logger.error("%s", error)
            return
