"""A trainer that learns nothing: it reads entries, makes real checkpoints, and acknowledges as a real one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis import Redis

from rollout_queue.contract.codec import encode
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import SessionSpec, Span, Turn, Verdict
from rollout_queue.contract.stream import Entry
from rollout_queue.redis import key_names
from tests.support.claimed import claimed_reader
from trainer_service.groups.acknowledgement import AcknowledgedTurn, Acknowledgement
from trainer_service.model.checkpoint_layout import Layout
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import LedgerStep, RunState

TOKENS = 3


def answer(redis: Redis, session_id: str) -> None:
    """Store a session with one turn, as a gateway does before an agent gets the end of its answer."""
    turn = Turn(
        turn_id=f"{session_id}-t",
        session_id=session_id,
        context_ids=TokenIds([1, 2]),
        output_ids=TokenIds(range(TOKENS)),
        logprobs=Logprobs([-0.5] * TOKENS),
        versions=(Span(0, 0, TOKENS),),
        finish="stop",
        started_at=100.0,
        finished_at=101.0,
        completion_id=f"chatcmpl-{session_id}",
    )
    spec, packed = encode(SessionSpec(session_id=session_id, created_at=100.0)), encode(turn)
    with redis.pipeline(transaction=True) as pipeline:
        pipeline.hset(key_names.session(session_id), mapping={"spec": spec, f"t:{turn.turn_id}": packed})
        pipeline.zadd(key_names.SESSIONS, {session_id: 100.0})
        pipeline.zadd(key_names.DEADLINES, {session_id: 4000.0})
        pipeline.xadd(key_names.STREAM, {key_names.STREAM_FIELD: packed})
        pipeline.execute()


class StatelessWeights:
    """Weights whose file is as long as the step."""

    layout = Layout(1, 0, "float32")

    def copy_states(self) -> "StatelessWeights":
        return self

    def write(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "weights.bin").write_bytes(b"w" * 1000)

    def load(self, directory: Path, tag: str, layout: Any, rate_scale: float = 1.0) -> None:
        assert (directory / tag / "weights.bin").stat().st_size == 1000


class SmallTrainer:
    """Begins where the checkpoint and the stream say."""

    def __init__(self, redis: Redis, directory: Path) -> None:
        self._reader = claimed_reader(redis)
        self._checkpoints = Checkpoints(directory, 2)
        state = self._checkpoints.restore(StatelessWeights()) or RunState()
        self.step, self.version = state.step, state.version
        self._owed: list[Acknowledgement] = []
        self._steps: list[LedgerStep] = []
        owed = set(state.owed.entry_ids)
        pending = list(self._reader.reclaim())
        self._waiting = [entry for entry in pending if entry.entry_id not in owed]
        if owed & {entry.entry_id for entry in pending}:
            self._reader.acknowledge(state.owed.entry_ids, state.owed.verdicts)

    def train(self, count: int = 5) -> None:
        """Make a step of up to `count` entries; none if nothing waits."""
        entries = [*self._waiting, *self._reader.read(count, 0.001)]
        self._waiting = entries[count:]
        if not entries:
            return
        self.step, self.version = self.step + 1, self.version + 1
        turns = [entry.record for entry in entries[:count] if isinstance(entry.record, Turn)]
        self._owed.append(self._acknowledgement(entries[:count]))
        names = [turn.turn_id for turn in turns]
        sessions = sorted({turn.session_id for turn in turns})
        self._steps.append(LedgerStep(self.step, self.version, True, names, sessions, TOKENS * len(names)))

    def checkpoint(
        self, written: Callable[[], None] = lambda: None, acknowledged: Callable[[], None] = lambda: None
    ) -> None:
        """Make a checkpoint, and acknowledge what it contains. `written` is called between the two."""
        owed = Acknowledgement.joined(self._owed)
        state = RunState(step=self.step, version=self.version, owed=owed)
        self._checkpoints.write(self._checkpoints.copied(StatelessWeights(), state, self._steps))
        self._owed, self._steps = [], []
        written()
        self._reader.acknowledge(owed.entry_ids, owed.verdicts)
        acknowledged()

    def _acknowledgement(self, entries: list[Entry]) -> Acknowledgement:
        trained = Verdict(code="trained", step=self.step, version=self.version)
        turns = [entry.record for entry in entries if isinstance(entry.record, Turn)]
        return Acknowledgement(
            [entry.entry_id for entry in entries],
            {turn.session_id: trained for turn in turns},
            [AcknowledgedTurn(turn.session_id, turn.turn_id, trained) for turn in turns],
        )
