"""Trains by the commands of users' own loops. The loop is in loop.py; a round does this:

    log ─ read ─▶ execute ─▶ answer, and at times: checkpoint ─▶ free ─▶ log

A result is answered as soon as its command is carried out. The log keeps the command until a durable
checkpoint contains it. After a crash, commands are read again from the place of the model that is furthest
behind. Those that a model contains are skipped; the others are carried out again, and have the same effect.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.outcomes import exclusion
from rollout_queue.contract.records import Outcome, Turn, Verdict
from rollout_queue.contract.stream import Entry, Verdicts
from rollout_queue.redis.command_log import CommandReader
from rollout_queue.redis.stream_reader import StreamReader
from rollout_queue.trainer_commands import (
    BEGINNING,
    CommandFailed,
    ForwardBackward,
    LoggedCommand,
    Refused,
    Result,
    Save,
)
from trainer_service.commands.executor import CommandExecutor, StepMade
from trainer_service.commands.model_ranks import ModelRanks
from trainer_service.commands.sampler_weights import DroppedWeights, SamplerWeights
from trainer_service.commands.saved_models import Exports, ModelStates, SavedModels, place_in
from trainer_service.groups.evaluation import EvaluationState
from trainer_service.heartbeat import Heartbeat
from trainer_service.loop import TrainingLoop
from trainer_service.model.checkpoint_layout import BaseModel
from trainer_service.settings import TrainerSettings
from trainer_service.shared_state import NotRestorable, SharedState
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.checkpoint_cycle import CheckpointCycle, Contents
from trainer_service.storage.durable_files import DiskRetry
from trainer_service.storage.run_state import LedgerStep, RunState
from trainer_service.trainer_metrics import Stopwatch, TrainerMetrics

logger = logging.getLogger(__name__)

NOT_BY_TURNS = Verdict(
    code="not_for_training", detail="the trainer learns from commands, and not from turns (trainer.source)"
)
ENTRIES = 200
"""How many entries are read at once."""


class UntrainedTurns:
    """Reads the entries of agents' sessions, and acknowledges each with its verdict."""

    def __init__(self, stream: StreamReader, heartbeat: Heartbeat) -> None:
        self._stream, self._heartbeat = stream, heartbeat
        self._reclaims = True
        """Whether entries may have been delivered and not acknowledged."""

    def settle(self) -> None:
        """Acknowledge the entries that are there now. Raises Stopped, LeaseLost."""
        self._heartbeat.retry(self._settle, StorageUnavailable, "waiting")

    def _settle(self) -> None:
        if self._reclaims:
            self._acknowledge([*self._stream.reclaim()])
            self._reclaims = False
        try:
            while entries := self._stream.read(ENTRIES, 0):
                self._acknowledge(entries)
        except StorageUnavailable:
            self._reclaims = True
            raise

    def _acknowledge(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        records = [entry.record for entry in entries]
        ended = [record.session_id for record in records if isinstance(record, Outcome)]
        decided = self._stream.verdict_codes(ended)
        sessions = {name: NOT_BY_TURNS for name in ended if name not in decided}
        turns = {
            (record.session_id, record.turn_id): exclusion(record, {}) or NOT_BY_TURNS
            for record in records
            if isinstance(record, Turn)
        }
        self._stream.acknowledge([entry.entry_id for entry in entries], Verdicts(sessions, turns))


COMMAND = "COMMAND"
MOST_ENDS = 3
"""A command that has ended so many processes is not tried again."""


class CommandNote(msgspec.Struct):
    """Places in the log."""

    computes: str | None = None
    """The command that is carried out now."""
    ends: dict[str, int] = {}
    """How many processes ended while they carried out a command."""


class CommandAttempts:
    """Counts how often a process ended during a command. The file need not survive a power cut, so writing it
    takes no sync; a disk that refuses it does not hinder the training."""

    def __init__(self, checkpoint_dir: Path) -> None:
        self._path = checkpoint_dir / COMMAND
        self._note = self._read()
        if self._note.computes is not None:  # the last process ended during this command
            ends = self._note.ends.get(self._note.computes, 0)
            self._note.ends[self._note.computes] = ends + 1
            self._note.computes = None

    def refusal(self, command: LoggedCommand) -> str | None:
        """Why a command is not tried again; None if it is."""
        ends = self._note.ends.get(command.position, 0)
        if ends < MOST_ENDS:
            return None
        return (
            f"the trainer ended {ends} times while it carried out this command, perhaps for lack of memory; "
            "it had no effect. Send less in one command"
        )

    @contextmanager
    def noted(self, command: LoggedCommand) -> Iterator[None]:
        """Inside the context, the process carries out this command."""
        if isinstance(command.command, Refused):
            yield
            return
        self._note.computes = command.position
        self._write()
        yield
        self._note.computes = None
        self._write()

    def forget(self, position: str) -> None:
        """Forget the commands up to this place, which no replay reaches."""
        self._note.ends = {
            each: ends for each, ends in self._note.ends.items() if place_in(each) > place_in(position)
        }

    def _read(self) -> CommandNote:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=CommandNote)
        except (OSError, msgspec.DecodeError):  # a power cut may have left a part of it
            return CommandNote()

    def _write(self) -> None:
        aside = self._path.with_name(f".{COMMAND}.tmp")
        with suppress(OSError):
            aside.write_bytes(msgspec.json.encode(self._note))
            aside.replace(self._path)


COUNT = 16
"""How many commands are read at once."""
BLOCK_S = 1.0
"""How long a read waits for a command."""
FULL = 0.5
"""The share of the log's most bytes from which on a checkpoint is due."""
Answer = TypeVar("Answer")
WAITING = "a command of a user's loop"


class CommandTrainer(TrainingLoop):
    """The loop over the commands of users' own loops."""

    def __init__(
        self,
        settings: TrainerSettings,
        ranks: ModelRanks,
        reader: CommandReader,
        sampler: SamplerWeights,
        checkpoints: Checkpoints,
        metrics: TrainerMetrics,
        shared_state: SharedState,
        heartbeat: Heartbeat,
        turns: UntrainedTurns | None = None,
    ) -> None:
        """`turns` ends the sessions of agents, which are not trained."""
        super().__init__(metrics, shared_state)
        self._reader, self._heartbeat = reader, heartbeat
        shared_state.model_checks = ranks.model_checks
        self._stopwatch, self._attempts = Stopwatch(), CommandAttempts(settings.checkpoint_dir)
        self._turns = turns
        self._saved = SavedModels(settings.checkpoint_dir, ranks)
        disk = DiskRetry(heartbeat, metrics, "waiting", "checkpoint")
        exports = Exports(settings, ranks, disk)
        self._dropped = DroppedWeights(reader, self._saved, exports, sampler, heartbeat)
        base = BaseModel.of(settings.model_path)
        self._states = ModelStates(base, ranks, lambda: self.executor.records(self._after))
        contents = Contents(self._state, EvaluationState, lambda _: set(), self._free)
        self._cycle = CheckpointCycle(
            checkpoints, self._states, settings, heartbeat, self._stopwatch, disk, contents
        )
        self.executor = CommandExecutor(
            settings,
            base,
            ranks,
            self._saved,
            exports,
            sampler,
            disk,
            settle=lambda: self._cycle.settle(wait=True),
            beat=lambda: heartbeat.beat("training"),
            stepped=self._report_step,
        )
        self.step = 0
        """The optimizer steps of all models."""
        self._position = self._after = self._copied = BEGINNING
        """Places in the log: the last that was ever reached; the last up to which every model has what it is
        to have, which is before the first while commands are read again; and the first of these in the last
        checkpoint, durable or not."""
        self._freeable = BEGINNING
        """What can be freed when the last checkpoint is durable."""
        self._durable = BEGINNING
        """No replay begins before this place."""
        self._unanswered = False
        """Whether a command is carried out that has no result yet."""

    def start(self) -> None:
        """Continue from the last checkpoint, and read the commands again that some model lacks."""
        state = self._cycle.restore() or RunState()
        self.step = state.step
        self.executor.resume(self._states.restored)
        self._position = self._copied = state.command_position
        behind = [record.progress.position for record in self._states.restored]
        self._after = self._durable = min(behind or [self._position], key=place_in)
        self._metrics.resume(self.step)
        self._heartbeat.note(self.step, 0)
        self._heartbeat.beat("waiting", WAITING)
        self._shared_state.ready = True

    @property
    def may_save(self) -> bool:
        """Not while the log has a command without a result: no checkpoint may contain it."""
        return not self._unanswered

    def roll_back(self, version: int) -> None:
        raise NotRestorable("with trainer.source commands, a user's loop goes back by `load_weights`")

    def pause(self) -> None:
        self._heartbeat.beat("paused")
        self._shared_state.sleep(BLOCK_S)

    def work(self) -> bool:
        """Read some commands, and carry them out."""
        with self._stopwatch.timed("read"):
            if self._turns is not None:
                self._turns.settle()
            commands = self._ask(lambda: self._reader.read(self._after, COUNT, BLOCK_S))
            asked = self.executor.model_ids | {each.model_id for each in commands}
            ended = self._ask(lambda: self._reader.ended(asked))
            self._dropped.read()
        for model_id in self.executor.model_ids & set(ended):
            logger.info("model %s has ended: %s", model_id, ended[model_id])
            self.executor.remove(model_id)
        for command in commands:
            self._carry_out(command, ended.get(command.model_id))
            self._after = command.position
            self.follow_up()
            if self._shared_state.stopping or self._shared_state.paused:
                break
        copied = max(self._durable, self._freeable, key=place_in)
        if not commands and self._dropped.waits_for(copied, self._furthest_behind()):
            self._cycle.begin()
        self._dropped.remove(self._durable)
        self._heartbeat.beat("waiting", WAITING)
        return bool(commands)

    def _carry_out(self, command: LoggedCommand, ended: str | None) -> None:
        """Carry out a command and answer it, unless that is done already."""
        if self._is_contained(command):
            return
        result = self._result(command, ended)
        if result is not None:
            self._unanswered = True
            self._ask(lambda: self._reader.answer(command, result))
            self._unanswered = False
        if place_in(command.position) > place_in(self._position):
            self._position = command.position

    def _result(self, command: LoggedCommand, ended: str | None) -> Result | None:
        """The result of a command; None if it has one, and need not be carried out again."""
        if (_has_no_effect(command) or ended is not None) and self._is_answered(command):
            self.executor.skip(command)
            return None
        if ended is not None:
            return CommandFailed(f"model {command.model_id} has ended: {ended}", "user")
        if (refusal := self._attempts.refusal(command)) is not None and not self._is_answered(command):
            self.executor.skip(command)
            return CommandFailed(refusal, "server")
        self._heartbeat.beat("training")
        with self._attempts.noted(command), self._stopwatch.timed("train"):
            return self.executor.execute(command)

    def _is_answered(self, command: LoggedCommand) -> bool:
        """Whether a client may have read the result. What it was promised has to be made, however often that
        ends a process."""
        (answered,) = self._ask(lambda: self._reader.answered([command.request_id]))
        return answered

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        """Call the log until it answers. Raises Stopped when told to stop."""
        return self._heartbeat.retry(call, StorageUnavailable, "waiting")

    def _is_contained(self, command: LoggedCommand) -> bool:
        """Whether the model contains the command. A model that is not there contains what was carried out
        before the checkpoint: it has ended since, or could not be made."""
        contained = self.executor.contains(command)
        if contained is None:
            return place_in(command.position) <= place_in(self._position)
        return contained

    def follow_up(self) -> None:
        """Begin a checkpoint if it is time for one, or if the log is half full and one would free a part."""
        self._cycle.save_if_due()
        held, most = self._ask(self._reader.held_bytes)
        if held > FULL * most and place_in(self._furthest_behind()) > place_in(self._freeable):
            self._cycle.begin()

    def save_if_outdated(self) -> None:
        if place_in(self._position) > place_in(self._copied):
            self._cycle.begin()
        self._cycle.settle(wait=True)

    def _state(self) -> RunState:
        """What a checkpoint contains now, beside the models."""
        self._copied, self._freeable = self._position, self._furthest_behind()
        return RunState(step=self.step, version=self.step, command_position=self._position)

    def _furthest_behind(self) -> str:
        """The place from which a restart would have to read."""
        records = self.executor.records(self._after)
        return min([self._after, *(each.progress.position for each in records)], key=place_in)

    def _free(self) -> None:
        """Free what the last checkpoint contains, which is durable."""
        position = self._freeable
        self._ask(lambda: self._reader.free(position))
        self._attempts.forget(position)
        self._saved.prune(position)
        self._durable = max(self._durable, position, key=place_in)

    def _report_step(self, made: StepMade) -> None:
        self.step += 1
        self._cycle.add(LedgerStep(self.step, self.step, True, [], [], made.tokens))
        place = {"step": self.step, "version": 0, "time": clock.now(), "tokens": made.tokens}
        values = {**place, **made.metrics, **self._stopwatch.laps(made.tokens)}
        self._metrics.stepped(values)
        self._heartbeat.note(self.step, 0, values)
        logger.info(
            "step %d, of model %s: %d tokens, gradient %.3g",
            self.step,
            made.model_id,
            made.tokens,
            made.metrics["grad_norm"],
        )


def _has_no_effect(command: LoggedCommand) -> bool:
    """Whether a command with a result need not be carried out again: what it does is durable, or nothing."""
    given = command.command
    return isinstance(given, Save) or (isinstance(given, ForwardBackward) and given.forward_only)
