"""What a loop does: where an episode is cut off, how calls are made, and loops of the user."""

import asyncio
import json
import re
from pathlib import Path

from tests.support.environments.running import RunTest
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until_async


async def test_an_episode_that_its_environment_cuts_off_is_truncated_with_what_it_earned(
    running: RunTest,
) -> None:
    summary = await running.play("Cut", group_size=1, episodes=1)
    assert summary["by_status"] == {"truncated": 1}
    (session,) = running.sessions()
    assert (session["status"], session["reward"]) == ("truncated", 1.0)
    assert [turn["reward"] for turn in session["turns"]] == [0.5, None]


async def test_a_conversation_that_no_longer_fits_is_truncated_and_not_failed(running: RunTest) -> None:
    running.engine.answer = lambda prompt: "1 " * 2100  # two such answers fill the context
    summary = await running.play("Count", group_size=1, episodes=1)
    assert summary["by_status"] == {"truncated": 1}
    assert list(summary["reasons"]) == ["the conversation does not fit into the model's context"]
    (session,) = running.sessions()
    assert session["status"] == "truncated"
    assert 0 < len(session["turns"]) < 3, "what was sampled before is recorded"


async def test_an_episode_that_lasts_too_long_is_truncated(
    turned: TurnedClock, running: RunTest, tmp_path: Path
) -> None:
    mark = tmp_path / "it hangs"
    options = {"how": "hangs", "mark": str(mark)}
    playing = asyncio.create_task(
        running.play("Faulty", options=options, group_size=1, episodes=1, episode_s=1000.0, step_s=3600.0)
    )
    await wait_until_async(mark.exists)
    turned.turn(1000)
    summary = await playing
    assert summary["by_status"] == {"truncated": 1}
    (session,) = running.sessions()
    assert (session["status"], session["reward"]) == ("truncated", None)


async def test_calls_of_one_answer_are_made_one_after_the_other(running: RunTest) -> None:
    def answer(prompt: str) -> str:
        if "taken: a, b" in prompt:
            return "done"
        calls = ({"name": "take", "arguments": {"name": name}} for name in "ab")
        return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)

    running.engine.answer = answer
    await running.play("Taking", group_size=1, episodes=1)
    (session,) = running.sessions()
    assert session["reward"] == 1.0
    _, second = session["turns"]
    assert second["relation"] == "extends"
    assert re.findall(r"taken: (\w(?:, \w)*)", second["context_text"]) == ["a", "a, b"]


async def test_a_loop_of_the_users_own_plays_the_episodes(running: RunTest) -> None:
    """The loop asks for a draft first, and only the second answer is a step of the environment."""
    running.engine.answer = lambda prompt: "0" if "again" in prompt else "a draft"
    loop = "tests.support.environments.drafts:play"
    await running.play("Double", loop=loop, mode="eval", tasks=1, group_size=1)
    (session,) = running.sessions()
    assert [turn["relation"] for turn in session["turns"]] == ["root", "extends"]
    assert session["reward"] == 1.0
