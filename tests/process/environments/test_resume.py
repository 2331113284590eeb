"""A run and its journal: a killed runner is resumed, every episode ends once, and memory does not grow."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from environments.errors import RunStopped
from environments.results import EpisodeEnded, GroupBegun, Journal, each_entry, each_episode
from environments.start_run import opened_run, source_of
from tests.support.environments.answering_engine import Gate
from tests.support.environments.running import TOYS, RunTest
from tests.support.waiting import wait_until
from weir.__main__ import app

ROOT = Path(__file__).parents[3]


async def test_a_session_that_was_deleted_meanwhile_is_played_again(running: RunTest) -> None:
    running.engine.answer = lambda prompt: "1"
    await running.play("Count", group_size=2, episodes=4, max_turns=1)
    journal = running.run_dir / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"group","' in line[:20] or '"kind":"group"' in line]
    journal.write_text("".join(kept))
    for session in running.sessions():
        running.delete(session["session_id"])
    await running.play("Count", group_size=2, episodes=4, max_turns=1, resume=True)
    again = Counter((each.group, each.member) for each in ended(running.run_dir))
    assert again == {(group, member): 1 for group in (0, 1) for member in (0, 1)}


async def test_a_member_that_is_left_alone_counts_as_played(running: RunTest) -> None:
    await running.play("Double", group_size=2, episodes=4, concurrency=1)
    journal = running.run_dir / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    last = ended(running.run_dir)[-1]
    running.delete(last.session_id)
    journal.write_text("".join(lines[:-1]))
    await running.play("Double", group_size=2, episodes=4, concurrency=1, resume=True)
    assert len(ended(running.run_dir)) == 4, "no further group"
    assert ended(running.run_dir)[-1].status == "abandoned"


def ended(run_dir: Path) -> list[EpisodeEnded]:
    return list(each_episode(run_dir))


def arguments(running: RunTest, mode: str) -> list[str]:
    """Of `weir`, for 32 episodes."""
    sizes = ["--group-size", "4", "--episodes", "32"] if mode == "run" else ["--tasks", "8", "-n", "4"]
    place = ["--run-dir", str(running.run_dir), "--gateway", running.url]
    return ["env", mode, f"{TOYS}:Count", *place, "--concurrency", "8", *sizes]


def answer(prompt: str) -> str:
    return str(1 + len(re.findall("go on", prompt)))


@pytest.mark.parametrize("mode", ["run", pytest.param("eval", marks=pytest.mark.long)])
def test_a_killed_runner_is_resumed_and_each_episode_ends_once(
    running: RunTest, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(48, answer)
    running.engine.answer = gate.answer
    monkeypatch.setenv("WEIR_CLIENT_KEYS", "")
    command = [sys.executable, "-m", "weir", *arguments(running, mode)]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as first:
        wait_until(lambda: len(ended(running.run_dir)) >= 6)  # 24 answers belong to others at most
        os.killpg(first.pid, signal.SIGKILL)
    gate.opened.set()
    journal = running.run_dir / "journal.jsonl"
    with journal.open("a", encoding="utf-8") as file:
        file.write('{"kind":"episode","group":3,"mem')  # as a kill cuts a line
    before = len(ended(running.run_dir))
    assert before < 32
    resumed = CliRunner().invoke(app, [*arguments(running, mode), "--resume"])
    assert resumed.exit_code == 0, resumed.output
    entries = ended(running.run_dir)
    places = Counter((each.group, each.member) for each in entries)
    assert set(places.values()) == {1}
    # In training one episode alone is not played again: there is nothing to compare it with.
    played = [each for each in entries if mode == "eval" or each.status != "abandoned"]
    assert all(each.status == "completed" and each.reward == pytest.approx(1.2) for each in played)
    begun = [each for each in each_entry(running.run_dir) if isinstance(each, GroupBegun)]
    assert len(begun) > len({each.group for each in begun}), "a group was interrupted"
    if mode == "eval":
        assert len(entries) == 32
    sessions = running.sessions()
    assert {each["state"] for each in sessions} <= {"finished", "waiting_reward"}
    codes = Counter(each["verdict"]["code"] for each in sessions)
    assert codes["abandoned"] > 0, "half-played sessions are abandoned"
    assert codes["open"] == codes["waiting_reward"] == 0


async def test_an_episode_that_ended_without_its_entry_is_not_played_again(running: RunTest) -> None:
    running.engine.answer = answer
    await running.play("Count", group_size=2, episodes=4)
    journal = running.run_dir / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-1]))  # killed between the verdict and its entry
    asked = len(running.engine.requests)
    summary = await running.play("Count", group_size=2, episodes=4, resume=True)
    assert len(running.engine.requests) == asked
    assert summary["by_status"] == {"completed": 4}
    assert len(ended(running.run_dir)) == 4


async def test_a_directory_holds_one_run_which_one_runner_plays(running: RunTest) -> None:
    with pytest.raises(RunStopped, match="there is no run in"):
        await running.play("Double", resume=True)
    await running.play("Double", group_size=1, episodes=1)
    with pytest.raises(RunStopped, match="holds a run"):
        await running.play("Double", group_size=1, episodes=1)
    with Journal(running.run_dir), pytest.raises(RunStopped, match="another process plays"):
        await running.play("Double", group_size=1, episodes=2, resume=True)


# What a run keeps in memory does not grow with its episodes: the journal has them


TASKS = 4


def kept_by(whole: Any) -> int:
    """How many values a run keeps, in its own objects and in what they hold."""
    seen: dict[int, Any] = {}
    left = [whole]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple | set | frozenset) or (
            isinstance(value, deque) and value.maxlen is None
        ):
            left += value
        elif type(value).__module__.startswith("environments."):
            names = getattr(value, "__struct_fields__", None) or vars(value)
            left += [getattr(value, name) for name in names]
    return len(seen)


async def kept_after(running: RunTest, directory: Path, episodes: int, resume: bool = False) -> int:
    settings = running.settings(
        "Double", group_size=2, tasks=TASKS, episodes=episodes, concurrency=4, skip_after=2
    )
    place = running.place_of(directory)
    async with opened_run(settings, place, source_of(settings, place), resume=resume) as (run, _):
        await run.play()
        assert run.figures.ended == episodes
        return kept_by(run)


async def test_a_run_keeps_no_more_after_many_episodes_than_after_few(
    running: RunTest, tmp_path: Path
) -> None:
    few = await kept_after(running, tmp_path / "few", 8)
    many = await kept_after(running, tmp_path / "many", 40)
    resumed = await kept_after(running, tmp_path / "many", 40, resume=True)
    assert max(many, resumed) <= few + 10, "a few numbers and texts may be other objects"
