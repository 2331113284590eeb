"""How a process comes to be the trainer: at once, after a crashed one's lease has run out, or not at all."""

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
"""Of what Redis says is left; a renewal adds far more."""


@contextmanager
def keep_lease(lease: Lease, shared_state: SharedState, retry_s: float) -> Iterator[bool]:
    """Hold the lease inside the block, renewed by a thread; False when told to stop before it was had.

    Raises SystemExit when another trainer lives.
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
        with suppress(StorageUnavailable):  # then it runs out
            lease.release()


def _claimed(lease: Lease, shared_state: SharedState, retry_s: float) -> bool:
    """False when told to stop. A lease that nobody renews is of a trainer that crashed."""
    runs_out_s: float | None = None
    while not shared_state.stopping:
        asked_s = time.monotonic()
        try:
            held = lease.claim()
        except StorageUnavailable as error:
            logger.warning("%s; again in %g s", error, retry_s)
            shared_state.sleep(retry_s)
            continue
        if held is None:
            return True
        if runs_out_s is None:
            runs_out_s = time.monotonic() + held.left_s
            logger.warning(
                "%s is of %s; unless renewed, it runs out in %.1f s", keys.LEASE, held.by, held.left_s
            )
        elif asked_s + held.left_s > runs_out_s + ROUNDING_S:
            raise SystemExit(f"another trainer holds {keys.LEASE}: {held.by}")
        shared_state.sleep(min(ASK_EVERY_S, held.left_s + 0.01))
    return False


def _keep(lease: Lease, ended: threading.Event) -> None:
    """Renew three times in the life of a lease. Who has lost it hears so from the stream's own fence."""
    while not ended.wait(lease.lease_s / 3):
        try:
            lease.renew()
        except StorageUnavailable as error:
            logger.warning("%s not renewed: %s", keys.LEASE, error)
        except LeaseLost as error:
            logger.error("%s", error)
            return
