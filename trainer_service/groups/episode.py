"""One session, as the trainer reads it from the stream: its records in any order, and how it ended."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from msgspec import structs

from rollout_queue.contract.outcomes import LARGEST_REWARD, OPENED_UNTRAINED
from rollout_queue.contract.records import Deletion, LateJoin, Outcome, Reward, Turn, Verdict
from rollout_queue.contract.stream import Entry
from trainer_service.groups.evaluation import Evaluation, evaluation_of
from trainer_service.rows.row_images import ImageRule
from trainer_service.rows.rows import contradiction, exclusions, planned_rows


class Rules(NamedTuple):
    """The settings that decide when a session has ended and when a group is complete."""

    vocab_size: int
    train_truncated: bool
    group_wait_s: float
    group_deadline_s: float | None = None
    group_min_size: int = 2
    over_sampling: float = 0.0
    experts_width: int = 0
    """How many experts a token has in the records that are replayed; others are dropped."""
    images: ImageRule | None = None
    """How the model reads images; None if turns that show some are not trained."""

    def needed(self, size: int) -> int:
        """How many rewarded members are enough for a group that was opened for `size`."""
        surplus = math.floor(size * self.over_sampling + 1e-9)  # 100 · 0.29 is 28.999…
        return min(size, max(self.group_min_size, size - surplus)) if surplus else size


@dataclass(frozen=True)
class Member:
    """A session that has ended."""

    session_id: str
    entry_ids: tuple[str, ...]
    turns: tuple[Turn, ...]
    reward: float | None
    """The sum of its rewards."""
    verdict: Verdict | None
    """Why it is not trained; None if it can be trained, or if the gateway has given it a verdict."""
    rewards: tuple[Reward, ...] = ()
    truncated: bool = False
    """The agent finished it with the status `truncated`."""
    evaluation: Evaluation | None = None
    """What the session shows about a version; None if it is not an evaluation session."""
    task_id: str | None = None

    @cached_property
    def trainable(self) -> frozenset[str]:
        """Ids of the turns that may be trained."""
        excluded = exclusions(self.turns)
        return frozenset(t.turn_id for t in self.turns if t.output_ids and t.turn_id not in excluded)

    @cached_property
    def sampled_by(self) -> tuple[int, int] | None:
        """The oldest and the newest version that sampled its trainable tokens; None if it has none."""
        found = [s.version for t in self.turns if t.turn_id in self.trainable for s in t.versions]
        return (min(found), max(found)) if found else None

    @cached_property
    def longest_row(self) -> int:
        """The tokens of the longest row that trains it; 0 if there is none."""
        return max(map(len, planned_rows(self.session_id, self.turns, self.trainable)), default=0)

    @property
    def rewarded(self) -> bool:
        return self.verdict is None and self.reward is not None


@dataclass
class Session:
    """The records of one session that were read so far."""

    session_id: str
    entry_ids: list[str] = field(default_factory=list)
    turns: dict[str, Turn] = field(default_factory=dict)
    rewards: dict[str, Reward] = field(default_factory=dict)
    outcome: Outcome | None = None
    deletion: Deletion | None = None
    late_join: LateJoin | None = None
    closed: bool = False
    """The gateway has given it a final verdict: failed, abandoned or expired."""
    last_record_at: float = 0.0
    """Seconds since 1970."""
    _named: str | None = None
    _ended: Member | None = None
    _ended_is_current: bool = False
    """Whether `_ended` includes all records so far. To compute `_ended` takes a check of every token."""

    @property
    def group_id(self) -> str:
        """The id of its group. A session without one is a group by itself, under its own id after a blank; no
        real id begins with a blank."""
        return self._named or f" {self.session_id}"

    @property
    def group_size(self) -> int | None:
        """How many members its group was opened for. A late join, an outcome or a deletion tells it; None
        before."""
        last = self.deletion or self.outcome or self.late_join
        return last.group_size if last else None

    @property
    def oldest(self) -> int | None:
        """The oldest version among its trainable tokens; None if it has none. Also None for a finished
        session without a reward, since the reward may never come."""
        if self.over and not self.rewards:
            return None
        turns = tuple(self.turns.values())
        excluded = exclusions(turns)
        sampled = (s.version for turn in turns if turn.turn_id not in excluded for s in turn.versions)
        return min(sampled, default=None)

    @property
    def over(self) -> bool:
        """Whether the agent has finished it, or a client has deleted it. A reward may still come."""
        return self.outcome is not None or self.deletion is not None

    @property
    def rewarded_at(self) -> float:
        """When it first had both an outcome and a reward, in seconds since 1970."""
        first = min((reward.created_at for reward in self.rewards.values()), default=0.0)
        return max(self.outcome.created_at if self.outcome else 0.0, first)

    def take(self, entry: Entry, experts_width: int = 0) -> list[str]:
        """Add the entry, and its record unless the session has that record already. Returns the entries that
        are not needed any more. A deleted session needs only the entry of its deletion, from which a
        restarted trainer knows that the group has this member. A turn keeps its experts only if the record
        has `experts_width` of them for each token."""
        if self.deletion is not None:
            return [entry.entry_id]
        freed: list[str] = []
        match entry.record:
            case Turn() as turn:
                if turn.experts is not None and turn.experts.width != experts_width:
                    turn = structs.replace(turn, experts=None)
                self.turns.setdefault(turn.turn_id, turn)
                self._note_record(turn.finished_at, self._named or turn.group_id)
            case Reward() as reward:
                self.rewards.setdefault(reward.key, reward)
                self._note_record(reward.created_at, self._named)
            case LateJoin() as late_join:
                self.late_join = late_join
                self._note_record(late_join.created_at, self._named or late_join.group_id)
            case Outcome() as outcome:
                self.closed |= outcome.status in ("failed", "abandoned")
                self.outcome = self.outcome or outcome
                self._note_record(outcome.created_at, self.outcome.group_id or self._named)
            case Deletion() as deletion:
                freed, self.entry_ids = self.entry_ids, []
                self.turns, self.rewards, self.outcome = {}, {}, None
                self.deletion = deletion
                self._note_record(deletion.created_at, deletion.group_id or self._named)
        self.entry_ids.append(entry.entry_id)
        return freed

    def ended(self, rules: Rules) -> Member | None:
        """The session as a member of its group; None while it lacks an outcome or a reward."""
        if not self._ended_is_current:
            self._ended, self._ended_is_current = self._end(rules), True
        return self._ended

    def late_member(self, rules: Rules, present: int) -> Member | None:
        """The session as a member whose group was released before it ended; None while its agent works on it.
        The group was released with `present` members; 0 as in `RunState.gone`."""
        ended = self.ended(rules)
        if not self.over or (ended is not None and not ended.rewarded):
            return ended
        detail = "its group went on without it" + (f", with {present} of its members" if present else "")
        verdict = Verdict(code="group_incomplete", detail=detail)
        return self._member(tuple(self.turns.values()), ended.reward if ended else None, verdict)

    def _note_record(self, at: float, named: str | None) -> None:
        self.last_record_at, self._named = max(self.last_record_at, at), named
        self._ended, self._ended_is_current = None, False

    def _end(self, rules: Rules) -> Member | None:
        if self.deletion is not None:
            return self._member((), None, None)
        if self.outcome is None:
            return None
        turns = tuple(self.turns.values())
        if self.closed:
            return self._member(turns, None, None)
        if not self.outcome.train:
            return self._member(turns, None, OPENED_UNTRAINED)
        if self.outcome.status == "truncated" and not rules.train_truncated:
            return self._member(
                turns, None, Verdict(code="truncated", detail="truncated sessions are not trained")
            )
        if not self.rewards:
            return None
        reward = sum(self.rewards[key].value for key in sorted(self.rewards))
        largest = max((each.value for each in self.rewards.values()), key=abs)
        if (
            not max(abs(largest), abs(reward)) <= LARGEST_REWARD
        ):  # also true for NaN, the sum of opposite infinities
            beyond = largest if abs(largest) > LARGEST_REWARD else reward
            detail = f"a reward of {beyond:g} is beyond {LARGEST_REWARD:g}"
            return self._member(turns, None, Verdict(code="invalid", detail=detail))
        if not turns:
            return self._member(turns, reward, Verdict(code="invalid", detail="the session has no turn"))
        if broken := contradiction(turns, rules.vocab_size, rules.images):
            return self._member(turns, reward, Verdict(code="invalid", detail=broken))
        return self._member(turns, reward, None)

    def _member(self, turns: tuple[Turn, ...], reward: float | None, verdict: Verdict | None) -> Member:
        rewards = tuple(self.rewards[key] for key in sorted(self.rewards))
        truncated = self.outcome is not None and self.outcome.status == "truncated"
        # The outcome knows the task of a session that got it after its first turns.
        tasks = [self.outcome.task_id] if self.outcome is not None else []
        tasks += [turn.task_id for turn in turns]
        return Member(
            session_id=self.session_id,
            entry_ids=tuple(self.entry_ids),
            turns=turns,
            reward=reward,
            verdict=verdict,
            rewards=rewards,
            truncated=truncated,
            evaluation=evaluation_of(turns, rewards, self.outcome),
            task_id=next((task for task in tasks if task is not None), None),
        )
