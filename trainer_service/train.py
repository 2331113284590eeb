"""The loop: turns in, weights out.

    read ─▶ assemble ─▶ advantage ─▶ batch ─▶ loss ─▶ step ─▶ checkpoint ─▶ publish ─▶ acknowledge
     ▲                                                                                     │
     └─────────────────────────────────────────────────────────────────────────────────────┘

An entry is acknowledged when a durable checkpoint contains the step that used it, or when it ended with a
verdict that no step can change. So whenever this process dies, the stream and the checkpoint together say
what is left to do.
"""

import logging
import math
import time

from trainer_service.checkpoint import Checkpoints, LedgerRow, State
from trainer_service.face import Face, Phase
from trainer_service.intake import BLOCK_S, Intake
from trainer_service.metrics import Metrics
from trainer_service.optimise import optimise
from trainer_service.policy import Policy
from trainer_service.publish import Publisher
from trainer_service.pulse import Pulse, Stopped
from trainer_service.settings import TrainerSettings
from trainer_service.settlement import Judged
from trainer_service.stopwatch import Stopwatch
from trainer_service.tally import Tally

logger = logging.getLogger(__name__)


class Diverged(Exception):
    """The gradient is not finite. Nothing of the step was saved; a restart goes back to the checkpoint."""


class Trainer:
    """Owns the policy and the stream, on the main thread; speaks to the HTTP thread through its face."""

    def __init__(
        self,
        settings: TrainerSettings,
        policy: Policy,
        intake: Intake,
        checkpoints: Checkpoints,
        publisher: Publisher,
        metrics: Metrics,
        face: Face,
        pulse: Pulse,
    ) -> None:
        self._settings = settings
        self._policy, self._intake = policy, intake
        self._checkpoints, self._publisher = checkpoints, publisher
        self._metrics, self._face, self._pulse = metrics, face, pulse
        self.step, self.version = 0, settings.initial_version
        self._undurable: list[LedgerRow] = []
        self._watch = Stopwatch()

    def run(self) -> None:
        """Train until told to stop, and leave everything that was trained in a checkpoint."""
        try:
            self.start()
            while not self._face.stopping:
                self.turn()
            self._save()
        except Stopped:
            logger.info("stopped while waiting; the next start takes up what is left")
            if self._undurable:
                self._checkpoint()

    def start(self) -> None:
        """Take up where the last checkpoint left, and what was read since and not acknowledged."""
        state = self._checkpoints.restore(self._policy) or State(version=self._settings.initial_version)
        self.step, self.version = state.step, state.version
        self._pulse.note(self.step, self.version)
        self._say("waiting")
        self._intake.resume(state)
        self._face.ready = True
        if self.step and self._due(self._settings.publish_every_steps):
            self._publisher.resume(self.version, self.step, self._policy.export)

    def turn(self) -> bool:
        """One turn of the loop. Returns whether it made a step."""
        self._grant_wishes()
        if self._face.paused:
            self._say("paused")
            self._face.sleep(BLOCK_S)
            return False
        with self._watch.timed("read"):
            self._intake.read()
            batch = self._intake.batch(self.version)
        if not batch:
            self._say("waiting")
            return False
        values = self._train(batch)
        if self._due(self._settings.checkpoint_every_steps):
            self._checkpoint()
        if self._due(self._settings.publish_every_steps):
            self._publish()
        if not self._undurable:
            with self._watch.timed("acknowledge"):
                self._intake.acknowledge()
        self._log(values)
        return True

    def _train(self, batch: list[Judged]) -> dict[str, float]:
        """Rows, loss, step. From here on the weights contain these groups."""
        rows = [row for judged in batch for row in judged.rows]
        with self._watch.timed("train"):
            self._say("training")
            values = optimise(
                self._policy,
                rows,
                self.version,
                self._settings.algorithm,
                lambda: self._pulse.beat("training"),
            )
        if not math.isfinite(values["grad_norm"]):
            raise Diverged(f"step {self.step + 1}: the gradient's norm is {values['grad_norm']}")
        self.step += 1
        self.version = self._publisher.next_version(self.version)
        self._pulse.note(self.step, self.version)
        self._intake.owe(batch, self.step, self.version)
        row = LedgerRow(
            step=self.step,
            version=self.version,
            durable=True,
            turns=[turn_id for row in rows for turn_id in row.turn_ids],
            sessions=sorted({row.session_id for row in rows}),
            tokens=sum(int(row.mask_L.sum()) for row in rows),
        )
        self._undurable.append(row)
        values |= self._intake.tally.values(rows)
        self._intake.tally = Tally()
        return values

    def _checkpoint(self) -> None:
        with self._watch.timed("checkpoint"):
            state = State(
                step=self.step, version=self.version, owed=self._intake.owed, settled=self._intake.settled
            )
            self._checkpoints.save(self._policy, state, self._undurable)
        self._undurable = []

    def _publish(self) -> None:
        with self._watch.timed("publish"):
            self._say("publishing")
            self._publisher.publish(self.version, self.step, self._policy.export)

    def _grant_wishes(self) -> None:
        if wishes := self._face.checkpoint_wishes():
            self._save(always=True)
            self._say("waiting")
            for wish in wishes:
                if wish.set_running_or_notify_cancel():  # else nobody waits for the answer any more
                    wish.set_result(self._face.snapshot)

    def _save(self, always: bool = False) -> None:
        """A checkpoint of what is new, and the acknowledgement that it allows."""
        if self._undurable or always:
            self._checkpoint()
        self._intake.acknowledge()

    def _due(self, every_steps: int) -> bool:
        return self.step % every_steps == 0

    def _say(self, phase: Phase) -> None:
        sentence = self._intake.waiting_for() if phase == "waiting" else None
        self._pulse.beat(phase, sentence)

    def _log(self, values: dict[str, float]) -> None:
        place = {"step": self.step, "version": self.version, "time": time.time()}
        values = {**place, **values, **self._watch.laps(values["tokens"])}
        self._metrics.stepped(values)
        self._pulse.note(self.step, self.version, values)
        logger.info(
            "step %d made version %d: reward %.3f, %d rows, %d tokens, |dlogprob| %.2g, gradient %.3g",
            self.step,
            self.version,
            values["reward_mean"],
            values["rows"],
            values["tokens"],
            values["mismatch/abs_logp"],
            values["grad_norm"],
        )
        self._say("waiting")
