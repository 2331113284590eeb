"""What a run leaves: its journal, and what the journal says.

run/environments/NAME/run.json        the settings, and what the environment said of itself
run/environments/NAME/journal.jsonl   {"group": …}  {"episode": …}  …

Each group that was begun and each episode that ended is a line. A kill can cut the last line; a reader leaves
it out, and the gateway knows what became of that episode.

journal ─▶ mean reward with its 95 % interval, pass@k, a row for each task, what failed ─▶ summary, picture
"""

import asyncio
import fcntl
import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Self, TextIO

import msgspec

from environments.environment import Status
from environments.errors import RunStopped
from environments.intervals import mean_interval, pass_at_k, wilson
from environments.session_client import SessionClient
from environments.settings import Mode


class GroupBegun(msgspec.Struct, frozen=True, tag_field="kind", tag="group"):
    """`visit` is the place of its task in the run's order. `attempt` counts how often a resumed run began
    it."""

    group: int
    visit: int
    task_id: str
    members: tuple[int, ...]
    attempt: int = 0


class EpisodeEnded(msgspec.Struct, frozen=True, tag_field="kind", tag="episode"):
    """One agent's episode. `versions` are the policy versions that sampled its tokens, where they were asked
    for."""

    group: int
    member: int
    seat: int
    session_id: str
    task_id: str
    status: Status
    reward: float | None
    turns: int
    seconds: float
    ended_at: float
    reason: str | None = None
    versions: tuple[int, ...] = ()
    metrics: dict[str, float] = {}


Entry = GroupBegun | EpisodeEnded


class Journal:
    """Appends entries; each one is with the operating system before the next episode can begin."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "journal.jsonl"
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        """Raises RunStopped if another process plays this run."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise RunStopped(f"another process plays the run in {self._path.parent}") from None
        _cut_last_line(self._path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()

    def add(self, entry: Entry) -> None:
        if self._file is None:
            raise RuntimeError("the journal is not open")
        self._file.write(msgspec.json.encode(entry).decode() + "\n")
        self._file.flush()


def each_episode(directory: Path) -> Iterator[EpisodeEnded]:
    """The episodes of a journal, in the order in which they ended, one at a time."""
    return (each for each in each_entry(directory) if isinstance(each, EpisodeEnded))


def each_entry(directory: Path) -> Iterator[Entry]:
    """The whole lines of a journal, in their order, one at a time: there may be millions. None if there is no
    journal."""
    path = directory / "journal.jsonl"
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(Entry)
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decoder.decode(line)


def _cut_last_line(path: Path) -> None:
    """Remove what follows the last line break, so that the next entry begins a line."""
    if path.exists() and (written := path.read_bytes()) and not written.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(written.rfind(b"\n") + 1)


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write JSON to a new file that then takes the place of the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    scratch.replace(path)


AT_ONCE = 16


async def with_versions(gateway: SessionClient, ended: Iterable[EpisodeEnded]) -> list[EpisodeEnded]:
    """The same episodes with their versions; one whose session is gone keeps what it has."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def asked(entry: EpisodeEnded) -> EpisodeEnded:
        async with slots:
            session = await gateway.session(entry.session_id)
        if session is None:
            return entry
        spans = {span["version"] for turn in session["turns"] for span in turn["versions"]}
        return msgspec.structs.replace(entry, versions=tuple(sorted(spans)))

    return list(await asyncio.gather(*(asked(each) for each in ended)))


KS = (1, 2, 4, 8, 16, 32, 64)
PASSES_AT = 1.0
"""An episode passes if its reward is at least this."""
WINDOW = 128


@dataclass
class RunResults:
    """What the episodes of a run came to. Of an episode it keeps its reward alone; by task, too, if this is
    an evaluation, and otherwise whether those of a group differ."""

    mode: Mode
    episodes: int = 0
    judged: int = 0
    turns: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    versions: Counter[int] = field(default_factory=Counter)
    by_group: dict[tuple[int, int], tuple[int, float, bool]] = field(default_factory=dict)
    """By group and seat: how many rewards it has, the first, and whether another one differs."""
    rewards: "array[float]" = field(default_factory=lambda: array("d"))
    """In the order in which the episodes ended."""
    by_task: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, ended: Iterable[EpisodeEnded], mode: Mode) -> Self:
        results = cls(mode)
        for each in ended:
            results.add(each)
        return results

    def add(self, entry: EpisodeEnded) -> None:
        """Count an episode, which ended after those that were added before."""
        self.episodes += 1
        self.turns += entry.turns
        self.statuses[entry.status] += 1
        self.versions.update(entry.versions)
        if entry.reason:
            self.reasons[entry.reason] += 1
        if entry.reward is not None:
            self.rewards.append(entry.reward)
            if entry.status in ("completed", "truncated"):
                self.judged += 1
                self._judge(entry, entry.reward)

    def _judge(self, entry: EpisodeEnded, reward: float) -> None:
        if self.mode == "eval":
            self.by_task[entry.task_id].append(reward)
            return
        key = (entry.group, entry.seat)
        count, first, differs = self.by_group.get(key, (0, reward, False))
        self.by_group[key] = (count + 1, first, differs or reward != first)

    def document(self) -> dict[str, Any]:
        """A document for `summary.json`. In training rewards change as the model learns, so there is no
        interval."""
        document: dict[str, Any] = {
            "episodes": self.episodes,
            "judged": self.judged,
            "by_status": dict(self.statuses),
            "reasons": dict(self.reasons.most_common(10)),
            "turns": self.turns,
        }
        if not self.judged:
            return document
        if self.mode == "train":
            start, end = self.rewards[:WINDOW], self.rewards[-WINDOW:]
            compared = [differs for count, _, differs in self.by_group.values() if count > 1]
            document["groups"] = {"compared": len(compared), "different": sum(compared)}
            return document | {"reward_start": fmean(start), "reward_end": fmean(end)}
        return document | self._evaluated()

    def _evaluated(self) -> dict[str, Any]:
        mean, low, high = mean_interval(self.by_task)
        passed = {task: sum(reward >= PASSES_AT for reward in each) for task, each in self.by_task.items()}
        return {
            "reward": {"mean": mean, "low": low, "high": high},
            "pass_rate": _rate(sum(passed.values()), self.judged),
            "pass_at_k": _pass_at_k(self.by_task, passed),
            "versions": dict(self.versions),
            "tasks": [
                {"task_id": task, "episodes": len(each), "reward": fmean(each), "passed": passed[task]}
                for task, each in sorted(self.by_task.items())
            ],
        }


def rewards_by_task(ended: Iterable[EpisodeEnded]) -> dict[str, list[float]]:
    """The rewards of the episodes that were judged."""
    return dict(RunResults.of(ended, "eval").by_task)


def _rate(passed: int, count: int) -> dict[str, float]:
    low, high = wilson(passed, count)
    return {"mean": passed / count, "low": low, "high": high}


def _pass_at_k(rewards: dict[str, list[float]], passed: dict[str, int]) -> dict[str, float]:
    """The mean over tasks, for each k for which every task has enough samples."""
    fewest = min(len(each) for each in rewards.values())
    return {
        str(k): fmean(pass_at_k(len(each), passed[task], k) for task, each in rewards.items())
        for k in KS
        if k <= fewest
    }


def draw_evaluations(path: Path, title: str, evaluations: Sequence[dict[str, Any]]) -> None:
    """Write a PNG of each evaluation's mean reward with its interval; nothing without rewards."""
    known = [(each["version"], each["reward"]) for each in evaluations if each.get("reward")]
    if not known:
        return
    versions, rewards = zip(*known, strict=True)
    means = [each["mean"] for each in rewards]
    below = [each["mean"] - each["low"] for each in rewards]
    above = [each["high"] - each["mean"] for each in rewards]
    with _axes(path) as axes:
        axes.errorbar(versions, means, yerr=(below, above), marker="o", capsize=3)
        axes.set(xlabel="policy version at the start", ylabel="mean reward, 95 % interval", title=title)


def draw(path: Path, title: str, rewards: Sequence[float]) -> None:
    """Write a PNG of the mean reward of the last 128 episodes; nothing without rewards."""
    if not rewards:
        return
    means = [fmean(rewards[max(0, place - WINDOW) : place]) for place in range(1, len(rewards) + 1)]
    with _axes(path) as axes:
        axes.plot(range(1, len(means) + 1), means)
        axes.set(xlabel="episodes", ylabel=f"mean reward of the last {WINDOW}", title=title)


@contextmanager
def _axes(path: Path) -> Iterator[Any]:
    """Axes whose figure is written as a PNG."""
    import matplotlib  # takes half a second

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    yield axes
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
