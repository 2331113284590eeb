"""One session as the stream tells it: what was read of it, in whatever order, and how it ended."""

from dataclasses import dataclass, field
from typing import NamedTuple

from rollout_queue.contract.records import Deletion, Outcome, Reward, Turn, Verdict
from rollout_queue.contract.stream import Entry
from rollout_queue.contract.verdicts import OPENED_UNTRAINED
from trainer_service.groups.evaluation import Evaluation, evaluation_of
from trainer_service.rows.turns import contradiction, exclusions

LARGEST_REWARD = 1e9
"""Of a session, or by itself, either way. Far beyond it gradients overflow, and no restart would help."""


class Rules(NamedTuple):
    """What decides that a session or a group is complete."""

    vocab_size: int
    train_truncated: bool
    group_wait_s: float
    group_deadline_s: float | None = None
    group_min_size: int = 2


@dataclass(frozen=True)
class Member:
    """A session that has ended. Its verdict is None when it can be trained, or when the gateway gave one."""

    session_id: str
    entry_ids: tuple[str, ...]
    turns: tuple[Turn, ...]
    reward: float | None
    """All of its rewards added up."""
    verdict: Verdict | None
    rewards: tuple[Reward, ...] = ()
    truncated: bool = False
    """Whether its agent finished it so."""
    evaluation: Evaluation | None = None
    """What it says of a version, where it is not to be trained."""

    @property
    def rewarded(self) -> bool:
        return self.verdict is None and self.reward is not None


@dataclass
class Session:
    """What the stream has said of one session so far."""

    session_id: str
    entry_ids: list[str] = field(default_factory=list)
    turns: dict[str, Turn] = field(default_factory=dict)
    rewards: dict[str, Reward] = field(default_factory=dict)
    outcome: Outcome | None = None
    deletion: Deletion | None = None
    closed: bool = False
    """Whether the gateway ended it with a verdict of its own: failed, abandoned or expired."""
    heard_at: float = 0.0
    _named: str | None = None
    _ended: Member | None = None
    _judged: bool = False
    """Whether `_ended` is true of everything taken so far; looking at every token is not for every tick."""

    @property
    def group_id(self) -> str:
        """A session without a group is a group of its own; the blank keeps it apart from any real id."""
        return self._named or f" {self.session_id}"

    @property
    def group_size(self) -> int | None:
        """What its group was made for, as far as this session knows."""
        last = self.deletion or self.outcome
        return last.group_size if last else None

    @property
    def oldest(self) -> int | None:
        """The first version that sampled anything of it that may be trained. None while only a reward is
        missing: that may never come."""
        if self.over and not self.rewards:
            return None
        turns = tuple(self.turns.values())
        excluded = exclusions(turns)
        sampled = (s.version for turn in turns if turn.turn_id not in excluded for s in turn.versions)
        return min(sampled, default=None)

    @property
    def over(self) -> bool:
        """Whether the agent has no more part in it; a reward may still be to come."""
        return self.outcome is not None or self.deletion is not None

    @property
    def rewarded_at(self) -> float:
        """When it had both its outcome and a reward. Rewards that come later leave it where it is."""
        first = min((reward.created_at for reward in self.rewards.values()), default=0.0)
        return max(self.outcome.created_at if self.outcome else 0.0, first)

    def take(self, entry: Entry) -> list[str]:
        """Add a record; one that is here already adds its entry only. Returns the entries of no more use: a
        deleted session keeps that of its deletion alone, so that it counts in its group after a restart."""
        if self.deletion is not None:
            return [entry.entry_id]
        freed: list[str] = []
        match entry.record:
            case Turn() as turn:
                self.turns.setdefault(turn.turn_id, turn)
                self._hear(turn.finished_at, self._named or turn.group_id)
            case Reward() as reward:
                self.rewards.setdefault(reward.key, reward)
                self._hear(reward.created_at, self._named)
            case Outcome() as outcome:
                self.closed |= outcome.status in ("failed", "abandoned")
                self.outcome = self.outcome or outcome
                self._hear(outcome.created_at, self.outcome.group_id or self._named)
            case Deletion() as deletion:
                freed, self.entry_ids = self.entry_ids, []
                self.turns, self.rewards, self.outcome = {}, {}, None
                self.deletion = deletion
                self._hear(deletion.created_at, deletion.group_id or self._named)
        self.entry_ids.append(entry.entry_id)
        return freed

    def ended(self, rules: Rules) -> Member | None:
        """The session as a member of its group; None while something of it is still to come."""
        if not self._judged:
            self._ended, self._judged = self._judge(rules), True
        return self._ended

    def left_behind(self, rules: Rules, present: int) -> Member | None:
        """The session as one that its group went without, with `present` members where anybody remembers
        how many; None while its agent goes on."""
        ended = self.ended(rules)
        if not self.over or (ended is not None and not ended.rewarded):
            return ended
        detail = "its group went on without it" + (f", with {present} of its members" if present else "")
        verdict = Verdict(code="group_incomplete", detail=detail)
        return self._member(tuple(self.turns.values()), ended.reward if ended else None, verdict)

    def _hear(self, at: float, named: str | None) -> None:
        self.heard_at, self._named = max(self.heard_at, at), named
        self._ended, self._judged = None, False

    def _judge(self, rules: Rules) -> Member | None:
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
        if not max(abs(largest), abs(reward)) <= LARGEST_REWARD:  # nor NaN, which infinities may add up to
            beyond = largest if abs(largest) > LARGEST_REWARD else reward
            detail = f"a reward of {beyond:g} is beyond {LARGEST_REWARD:g}"
            return self._member(turns, None, Verdict(code="invalid", detail=detail))
        if not turns:
            return self._member(turns, reward, Verdict(code="invalid", detail="the session has no turn"))
        if broken := contradiction(turns, rules.vocab_size):
            return self._member(turns, reward, Verdict(code="invalid", detail=broken))
        return self._member(turns, reward, None)

    def _member(self, turns: tuple[Turn, ...], reward: float | None, verdict: Verdict | None) -> Member:
        rewards = tuple(self.rewards[key] for key in sorted(self.rewards))
        truncated = self.outcome is not None and self.outcome.status == "truncated"
        evaluation = evaluation_of(turns, rewards, self.outcome)
        entry_ids = tuple(self.entry_ids)
        return Member(self.session_id, entry_ids, turns, reward, verdict, rewards, truncated, evaluation)
