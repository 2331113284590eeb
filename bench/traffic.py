"""What happens to a day's sessions at 0.5, 1, 2 and 4 times the trainer's capacity, by the setting for it.

python -m bench.traffic [--loads 0.5 1 2 4] [--hours 24] [--swing 0.8] [--seed 0]

demand ─ admission (the gateway's arithmetic) ─▶ sessions ─▶ Intake (the trainer's code) ─▶ steps, verdicts

The clock is virtual, and a step is a wait of 8 minutes: there is no model, no Redis and no engine. Demand
swings over the day, `--swing` above and below its mean. Tasks differ in popularity (as 1, 1/2, 1/3, …) and in
the length of their sessions (1.6 to 32 minutes in the median, log-normal). A session samples by the version
that is served when it begins, and later by the one that is served when it ends. A group that admission
refuses does not come again."""

import argparse
import heapq
import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import cast

from prometheus_client import CollectorRegistry

from gateway.callers.backpressure import StalenessBudget, TrainerBacklog
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.published_policy import TrainedStep
from rollout_queue.contract.records import Outcome, Record, Reward, Span, Turn
from rollout_queue.contract.stream import Entry, GroupMembers, Verdicts
from rollout_queue.redis.stream_reader import StreamReader
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.heartbeat import Heartbeat
from trainer_service.intake import Intake
from trainer_service.shared_state import SharedState
from trainer_service.trainer_metrics import TrainerMetrics

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
STEP_S = 480.0
GROUPS_PER_STEP, GROUP_SIZE = 8, 2
TASKS = 20
SHORTEST_S, LONGEST_S, SPREAD = 96.0, 1920.0, 0.5
"""Median lengths of the sessions of the shortest and of the longest task; standard deviation of the log."""


@dataclass(frozen=True)
class Demand:
    """A group that somebody wants to sample."""

    number: int
    task: int
    at_s: float
    lengths_s: tuple[float, ...]
    """How long each of its sessions takes."""


def demands(load: float, hours: float, swing: float, seed: int) -> Iterator[Demand]:
    """Groups at `load` times the capacity in the mean, in the order in which they come."""
    draw = random.Random(seed)
    lengths = [SHORTEST_S * (LONGEST_S / SHORTEST_S) ** (task / (TASKS - 1)) for task in range(TASKS)]
    draw.shuffle(lengths)
    popularity = [1 / (1 + task) for task in range(TASKS)]
    most = load * GROUPS_PER_STEP / STEP_S * (1 + swing)
    at_s, number = 0.0, 0
    while (at_s := at_s + draw.expovariate(most)) < hours * HOUR_S:
        if draw.random() * (1 + swing) > 1 + swing * math.sin(2 * math.pi * at_s / DAY_S):
            continue  # thins the arrivals to the rate at this time of the day
        (task,) = draw.choices(range(TASKS), popularity)
        taken = tuple(draw.lognormvariate(math.log(lengths[task]), SPREAD) for _ in range(GROUP_SIZE))
        yield Demand(number, task, at_s, taken)
        number += 1


@dataclass
class VirtualStream:
    """The stream without Redis: it keeps what was not read, and the verdicts by session."""

    entries: list[Entry] = field(default_factory=list)
    codes: dict[str, str] = field(default_factory=dict)
    written: int = 0

    def append(self, record: Record) -> None:
        self.written += 1
        self.entries.append(Entry(str(self.written), record))

    def confirm(self) -> None:
        pass

    def reclaim(self) -> Iterable[Entry]:
        return []

    def read(self, count: int, block_s: float) -> Sequence[Entry]:
        taken, self.entries = self.entries[:count], self.entries[count:]
        return taken

    def acknowledge(self, entry_ids: Sequence[str], verdicts: Verdicts) -> None:
        assert not self.codes.keys() & verdicts.sessions.keys(), "a session has one verdict"  # noqa: S101
        self.codes |= {session_id: verdict.code for session_id, verdict in verdicts.sessions.items()}

    def verdict_codes(self, session_ids: Collection[str]) -> Mapping[str, str]:
        return {}

    def group_members(self, group_ids: Collection[str]) -> Mapping[str, GroupMembers]:
        return {}

    def image_bytes(self, hashes: Collection[str]) -> Mapping[str, bytes]:
        return {}

    def reserve(self, version: int, location: str) -> int:
        return version

    def report(self, state: Mapping[str, str | int | float]) -> None:
        pass


POLL_S = 30.0
"""How long the trainer waits before it looks again for a full step."""
MAX_STALENESS = 8


@dataclass(frozen=True)
class Choice:
    """One way to handle more sessions than the trainer trains."""

    name: str
    algorithm: Mapping[str, object]
    staleness_versions: int | None = None
    """`gateway.limits.staleness_versions`."""


CHOICES = (
    Choice("oldest", {"intake": "oldest"}),
    Choice("newest", {"intake": "newest"}),
    Choice("newest, replay_share 0.25", {"intake": "newest", "replay_share": 0.25}),
    Choice("bounded, 16 groups", {"intake": "bounded", "max_waiting_groups": 2 * GROUPS_PER_STEP}),
    Choice("newest, staleness_versions 4", {"intake": "newest"}, staleness_versions=4),
    Choice("oldest, staleness_versions 4", {"intake": "oldest"}, staleness_versions=4),
)


@dataclass(frozen=True)
class Outcomes:
    """What became of the sessions. Shares are of the demand."""

    trained: float
    refused: float
    """They were not sampled."""
    lost: float
    """They were sampled and not trained."""
    unfinished: float
    """They ran or waited when the day was over."""
    staleness: Sequence[int]
    """Versions between the oldest token of each trained session and the trainer, sorted."""
    fairness: float
    """Jain's index of the tasks' trained shares: 1 if all are equal, 1/n if one of n tasks is trained."""
    most_waiting: int
    """The largest number of sessions that had ended and waited for a step."""

    @property
    def p95(self) -> int:
        return self.staleness[int(0.95 * (len(self.staleness) - 1))]


def jain(shares: Sequence[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


class Day:
    """The trainer, the gateway's admission and all sessions, on one virtual clock."""

    def __init__(self, choice: Choice) -> None:
        rows = GROUPS_PER_STEP * GROUP_SIZE
        step = {"min_live_rows": rows, "max_rows": rows, "max_staleness": MAX_STALENESS}
        self._algorithm = AlgorithmSettings.model_validate({**step, "group_wait_s": 1e12, **choice.algorithm})
        self._stream = VirtualStream()
        reader = cast(StreamReader, self._stream)
        heartbeat = Heartbeat(reader, SharedState(), 1.0)
        metrics = TrainerMetrics(CollectorRegistry())
        self._intake = Intake(reader, self._algorithm, 64, heartbeat, metrics)
        self._versions = choice.staleness_versions
        self._now_s, self._version = 0.0, 0
        self._running: list[tuple[float, int, int, int]] = []
        """When each session ends, its group's number, its place in the group and its first version."""
        self._admitted: dict[int, Demand] = {}
        self._refused = Counter[int]()
        self._staleness: list[int] = []
        self._most_waiting = 0

    def run(self, load: float, hours: float, swing: float, seed: int) -> Outcomes:
        coming = list(demands(load, hours, swing, seed))[::-1]
        while self._now_s < hours * HOUR_S:
            self._intake.read()
            batch = self._intake.select(self._version, self._algorithm)
            self._most_waiting = max(self._most_waiting, self._intake.backlog.waiting)
            self._pass_by(STEP_S if batch.full else POLL_S, coming)
            if batch.full:
                trained = [member for each in batch.groups for member in each.group.members]
                spans = [member.sampled_by for member in trained if member.sampled_by is not None]
                self._staleness += [self._version - oldest for oldest, _ in spans]
                self._version += 1
                made = [row for each in batch.groups for row in each.rows]
                step = TrainedStep(self._version, self._version, self._version - 1, len(made), 0, 0)
                self._intake.mark_trained(batch.groups, made, step)
                self._intake.run_state(self._version, self._version)  # a checkpoint after each step
                self._intake.acknowledge()
        return self._outcomes()

    def _pass_by(self, seconds: float, coming: list[Demand]) -> None:
        """Let groups come and sessions end while the served version stays the same."""
        self._now_s += seconds
        while coming and coming[-1].at_s <= self._now_s:
            self._begin(coming.pop())
        while self._running and self._running[0][0] <= self._now_s:
            self._end(*heapq.heappop(self._running))

    def _begin(self, demand: Demand) -> None:
        if not self._admits():
            self._refused[demand.task] += 1
            return
        self._admitted[demand.number] = demand
        for place, length_s in enumerate(demand.lengths_s):
            heapq.heappush(self._running, (demand.at_s + length_s, demand.number, place, self._version))

    def _admits(self) -> bool:
        """As the gateway decides it, with a poll at every call."""
        if self._versions is None:
            return True
        backlog = self._intake.backlog
        told = TrainerBacklog(
            version=self._version,
            rollouts_waiting=backlog.waiting,
            rollouts_owed=backlog.owed,
            rollouts_per_step=backlog.per_step,
            last_seen=0.0,
        )
        budget = StalenessBudget(self._versions, told, serving=self._version)
        untrained = GROUP_SIZE * len(self._admitted) - len(self._stream.codes)
        return not budget.used_up and untrained < budget.bound

    def _end(self, at_s: float, number: int, place: int, began: int) -> None:
        group_id, session_id = str(number), f"{number}-{place}"
        spans = [Span(began, 0, 1), Span(self._version, 1, 2)]
        turn = Turn(
            turn_id=session_id,
            session_id=session_id,
            group_id=group_id,
            task_id=str(self._admitted[number].task),
            context_ids=TokenIds([2]),
            output_ids=TokenIds([3, 4]),
            logprobs=Logprobs([-1.0, -1.0]),
            versions=tuple(spans) if began != self._version else (Span(began, 0, 2),),
            finish="stop",
            started_at=at_s,
            finished_at=at_s,
        )
        self._stream.append(turn)
        self._stream.append(Reward(session_id=session_id, value=float(place), key="finish", created_at=at_s))
        self._stream.append(
            Outcome(
                session_id=session_id,
                status="completed",
                group_id=group_id,
                group_size=GROUP_SIZE,
                created_at=at_s,
            )
        )

    def _outcomes(self) -> Outcomes:
        demand = Counter(each.task for each in self._admitted.values()) + self._refused
        total = GROUP_SIZE * demand.total()
        trained = Counter[int]()
        for session_id, code in self._stream.codes.items():
            trained[self._admitted[int(session_id.partition("-")[0])].task] += code == "trained"
        lost = len(self._stream.codes) - trained.total()
        refused = GROUP_SIZE * self._refused.total()
        return Outcomes(
            trained=trained.total() / total,
            refused=refused / total,
            lost=lost / total,
            unfinished=(total - refused - len(self._stream.codes)) / total,
            staleness=sorted(self._staleness),
            fairness=jain([trained[task] / (GROUP_SIZE * number) for task, number in demand.items()]),
            most_waiting=self._most_waiting,
        )


HEAD = (
    *("load", "setting", "trained", "refused", "lost", "staleness: mean", "p95", "fairness"),
    "most that waited",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--swing", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    for cells in (HEAD, ("---",) * len(HEAD)):
        print(f"| {' | '.join(cells)} |")
    for load in asked.loads:
        for choice in CHOICES:
            found = Day(choice).run(load, asked.hours, asked.swing, asked.seed)
            shares = (f"{share:.0%}" for share in (found.trained, found.refused, found.lost))
            ages = (f"{fmean(found.staleness):.1f}", str(found.p95), f"{found.fairness:.2f}")
            cells = (f"{load:g}", choice.name, *shares, *ages, str(found.most_waiting))
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
