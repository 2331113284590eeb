"""Finds out how the push of the last announced version ended."""

import logging

from rollout_queue.protocol.policies import PushResult
from trainer_service.metrics import TrainerMetrics
from trainer_service.publishing.gateway_client import GatewayClient, GatewayUnavailable, VersionUnknown

logger = logging.getLogger(__name__)

Results = tuple[PushResult, ...]
"""The results of a push, one per server."""


class PushFollower:
    """Asks the gateway, and reports what servers did: in the log and in the metrics."""

    def __init__(self, gateway: GatewayClient, metrics: TrainerMetrics) -> None:
        self._gateway, self._metrics = gateway, metrics
        self.announced: int | None = None
        """The last announced version, until it is known how its push ended."""
        self.refused: int | None = None
        """The last version that every server has refused; None if a server has taken one since."""
        self._failures, self._reason = 0, ""
        """How many pushes have failed since a server took one, and how the last of them did."""

    @property
    def trouble(self) -> str | None:
        """Why the fleet serves older weights than the trainer's; None if the last push did not fail."""
        if not self._failures:
            return None
        pushes = "push" if self._failures == 1 else "pushes"
        return f"engines sample with older weights: the last {self._failures} {pushes} {self._reason}"

    def follow(self) -> None:
        """Ask how the push goes, if one is not known to have ended."""
        if self.announced is None:
            return
        version = self.announced
        try:
            detail = self._gateway.push_of(version)
        except VersionUnknown as error:
            logger.error("no server took version %d: %s", version, error)
            self._metrics.pushed(False)
            self._note_failure(str(error), refused=True)
            self.announced, self.refused = None, version
            return
        except GatewayUnavailable as error:
            logger.warning("the gateway does not tell how the push of version %d goes: %s", version, error)
            return
        if detail.push is not None and detail.push.state == "superseded":
            logger.info("a newer version has replaced version %d before every server had it", version)
        elif detail.push is not None and detail.push.state != "pushing":
            failed = detail.push.state == "failed"
            self.account(version, detail.results, failed=failed, error=detail.push.error)
        else:
            return
        self.announced = None

    def account(
        self, version: int, results: Results, *, failed: bool = False, error: str | None = None
    ) -> None:
        """Report the results of a push that has ended. The gateway knows no results of one that a later push
        has replaced, but whether it has `failed`, and its `error`."""
        for result in results:
            self._metrics.pushed(result.ok)
            if not result.ok:
                logger.error("server %s did not take version %d: %s", result.server, version, result.error)
        if failed or (results and not any(result.ok for result in results)):
            logger.error("no server took version %d", version)
            errors = (f"{result.server}: {result.error}" for result in results if result.error)
            refused = all(result.state == "refused" for result in results)
            self._note_failure(error or "; ".join(errors), refused=refused)
            if results and refused:
                self.refused = version
        else:
            self.refused, self._failures = None, 0
            logger.info("version %d is served by %d servers", version, sum(result.ok for result in results))

    def _note_failure(self, why: str, *, refused: bool) -> None:
        self._failures += 1
        verb = "was refused" if self._failures == 1 else "were refused"
        self._reason = f"{verb if refused else 'failed'}: {why}"
