"""The loop of a trainer, whatever it learns from: agents' turns (train.py) or users' commands (commands/).

    read ─▶ work ─▶ answer, and at times: checkpoint ─▶ free
     turns     a step    the version is published          the stream's entries are acknowledged
     commands  on models the result is in the log          the log's commands are freed

States
    starting   the last checkpoint is restored, and what it lacks is read again
    waiting    for a full batch, for a command, or for Redis, the disk, the gateway or the teacher
    training, publishing
    paused     an operator or a guard has paused the trainer: nothing is worked on, what arrives waits
    stopping   told to stop: a last checkpoint is made, unless what is in memory may not be kept

Events
    from outside     checkpoint, rollback, pause, resume, stop: the HTTP thread asks, a round's begin answers
    from behind      a push has ended, a checkpoint is durable: noted at a round's begin
    from the source  entries or commands: read in a round

Invariants
    1. Weights change on the main thread only. Others see them, in a checkpoint or a version, only after the
       lease was confirmed.
    2. What is freed is in a durable checkpoint, or will never be trained. So a crash loses no work that was
       asked for, and trains no token twice.
    3. What was answered is made again after a crash with the same effect: a version has its number, and a
       command its place in the log, before weights change.
    4. A checkpoint is copied between steps or commands, never within one. It has the weights, the position
       and everything that decides the next step.
    5. Publishing and checkpoints do not wait for each other. The next one of each waits for the former.
"""

import logging
from contextlib import suppress

from rollout_queue.service_log import begin_log_ids
from trainer_service.heartbeat import Stopped
from trainer_service.shared_state import SharedState
from trainer_service.storage.checkpoint_cycle import CheckpointCycle
from trainer_service.trainer_metrics import TrainerMetrics

logger = logging.getLogger(__name__)


class TrainingLoop:
    """Runs rounds on the main thread. The HTTP thread reaches it only through `shared_state`."""

    _cycle: CheckpointCycle
    """To be set by the source."""

    def __init__(self, metrics: TrainerMetrics, shared_state: SharedState) -> None:
        self._metrics, self._shared_state = metrics, shared_state

    def run(self) -> None:
        """Train until told to stop, then save everything that was trained in a checkpoint."""
        try:
            begin_log_ids()
            self.start()
            while not self._shared_state.stopping:
                self.run_once()
            self.save_if_outdated()
        except Stopped:
            logger.info("stopped while waiting; the next start continues from here")
            if self.may_save:
                with suppress(Stopped):
                    self.save_if_outdated()
        finally:
            self._shared_state.stop()  # what waits in the background for the disk or the gateway ends
            self._cycle.close()
            self.close()

    def run_once(self) -> bool:
        """One round. Returns whether a step was made, or a command was carried out."""
        self._shared_state.answer_checkpoint_requests(self._cycle.save)
        self._shared_state.answer_rollback_requests(self.roll_back)
        self.follow_up()
        self._metrics.paused(self._shared_state.paused)
        if self._shared_state.paused:
            self.pause()
            return False
        return self.work()

    @property
    def may_save(self) -> bool:
        """Whether a trainer that is stopped while it waits may make a checkpoint."""
        raise NotImplementedError

    def start(self) -> None:
        """Continue from the last checkpoint."""
        raise NotImplementedError

    def follow_up(self) -> None:
        """Note what the background has done, and begin a checkpoint if it is time for one."""
        raise NotImplementedError

    def pause(self) -> None:
        """A moment of a pause."""
        raise NotImplementedError

    def work(self) -> bool:
        """Read, and train on it if there is enough. Returns whether anything was trained."""
        raise NotImplementedError

    def roll_back(self, version: int) -> None:
        """Go back to a version, because an operator asks for it. Raises NotRestorable."""
        raise NotImplementedError

    def save_if_outdated(self) -> None:
        """Make a checkpoint of what the last one lacks. Returns when it is durable."""
        raise NotImplementedError

    def close(self) -> None:
        """Close what the source has opened."""
