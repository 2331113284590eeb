"""Each view and each action of the page, on a real run of the demo: SGLang, DeepSpeed, and two servers."""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.page.browser import Tab, go
from tests.support.page.demo_run import ADMIN_KEY, SECOND, DemoRun, demo_run
from tests.support.page.dialogs import act, version_row
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(7200)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoRun]:
    with demo_run(tmp_path_factory.mktemp("demo")) as run:
        yield run


def at(demo: DemoRun, tab: Tab, place: str) -> Page:
    return go(tab(demo.url, ADMIN_KEY).tab, place)


def trained_session(demo: DemoRun) -> str:
    """The newest one that a step has trained."""
    found: str = demo.ask("/sessions?order=newest&verdict=trained&limit=1")["data"][0]["session_id"]
    return found


def test_now_shows_what_the_run_does(demo: DemoRun, tab: Tab) -> None:
    page, trainer = at(demo, tab, "#/now"), demo.trainer()
    expect(page.locator(".lead")).to_contain_text(
        f"The trainer waits for {trainer['waiting_for'].split(';')[0]}"
    )
    stats = page.locator(".stat")
    expect(stats.filter(has_text="Version served")).to_contain_text(str(demo.serving()))
    expect(stats.filter(has_text="Reward")).to_contain_text(f"mean of step {trainer['step']}")
    expect(page.get_by_text("2 of 2 servers can take calls.")).to_be_visible()
    stages = demo.ask("/admin/pipeline")["verdicts"]
    trained = page.locator(".bars li").filter(has_text=re.compile("^trained", re.I))
    expect(trained).to_contain_text(f"{stages['session:trained']:,}")


def test_a_trained_session_is_found_and_its_tokens_have_the_trainers_numbers(demo: DemoRun, tab: Tab) -> None:
    page, session = at(demo, tab, "#/sessions"), trained_session(demo)
    page.get_by_label("Verdict").select_option("trained")
    page.get_by_role("button", name="Search").click()
    page.get_by_role("link", name=session).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Session {session}")
    view = demo.ask(f"/sessions/{session}?tokens=true&token_texts=true")
    turn = next(each for each in view["turns"] if each["output_len"])
    members = demo.ask(f"/admin/groups/{view['group_id']}")["members"]
    advantage = next(each["advantage"] for each in members if each["session_id"] == session)
    tokens = page.get_by_role("region", name="Tokens of turn 1")
    tokens.locator(".tok").last.hover()
    shown = page.locator(".token-numbers").first.inner_text().replace("\n", " ")
    assert f"Version {turn['versions'][-1]['version']}" in shown
    assert "Trained yes" in shown
    for colour, legend in (
        ("version", f"version {turn['versions'][0]['version']}"),
        ("mask", "sampled by the model"),
        ("advantage", "and more" if advantage > 0 else "and less"),
        ("ratio", "0.98 to 1.02"),
        ("verdict", "trained"),
        ("logprob", "99 % and more"),
    ):
        page.get_by_label("Colour by").select_option(colour)
        expect(page.locator(".legend li", has_text=legend).first).to_be_visible()


def test_members_of_a_group_are_side_by_side_and_lead_to_what_they_taught(demo: DemoRun, tab: Tab) -> None:
    session = trained_session(demo)
    page = at(demo, tab, f"#/sessions/{session}")
    page.get_by_role("button", name="Beside this one").first.click()
    expect(page.locator(".tokens")).to_have_count(2)
    verdict = demo.ask(f"/sessions/{session}")["verdict"]
    link = f"Version {verdict['version']}, which learned from it in step {verdict['step']}"
    page.get_by_role("link", name=link).click()
    taught = page.get_by_role("table", name="Turns that taught the version")
    expect(taught.get_by_role("link", name=session).first).to_be_visible()
    group = demo.ask(f"/sessions/{session}")["group_id"]
    taught.get_by_role("link", name=group).first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Group {group}")
    compared = demo.ask(f"/admin/groups/{group}")
    expect(page.locator(".advantages li")).to_have_count(len(compared["members"]))
    expect(page.locator(".advantages li").first).to_contain_text("advantage")


def test_a_session_says_why_it_is_not_trained(demo: DemoRun, tab: Tab) -> None:
    """In every run of the demo, there are groups whose rewards are equal."""
    equal = demo.ask("/sessions?order=newest&verdict=zero_advantage&limit=1")["data"][0]["session_id"]
    page = at(demo, tab, f"#/sessions/{equal}?colour=verdict")
    why = "so its advantage is 0."
    expect(page.get_by_role("region", name="Verdict")).to_contain_text(why)
    expect(page.locator(".legend")).to_contain_text(why)


def test_the_curve_of_the_reward_is_that_of_the_trainers_file(
    demo: DemoRun, tab: Tab, tmp_path: Path
) -> None:
    page = at(demo, tab, "#/learning?m=reward_mean,mismatch/kl_current")
    reward = page.get_by_role("region", name="reward_mean")
    expect(reward.locator("canvas")).to_be_visible()
    expect(page.get_by_role("region", name="mismatch/kl_current")).to_contain_text("Guard max_kl")
    with page.expect_download() as saved:
        reward.get_by_role("button", name="CSV of reward_mean").click()
    with Path(saved.value.path()).open(encoding="utf-8") as file:
        drawn = {int(row["step"]): float(row["mean"]) for row in csv.DictReader(file)}
    lines = [json.loads(line) for line in demo.metrics.read_text(encoding="utf-8").splitlines()]
    recorded = {line["step"]: line["reward_mean"] for line in lines if "reward_mean" in line}
    assert drawn == pytest.approx(recorded)
    with page.expect_download() as picture:
        reward.get_by_role("button", name="PNG of reward_mean").click()
    assert Path(picture.value.path()).read_bytes().startswith(b"\x89PNG")


def test_versions_are_rolled_back_held_released_and_promoted(demo: DemoRun, tab: Tab) -> None:
    newest = demo.serving()
    page = at(demo, tab, "#/policies")
    roll_back = f"Roll back to version {newest - 1}"
    says = f"Every server loads version {newest - 1} again, in place of version {newest}."
    act(page, roll_back, f"Roll back to {newest - 1}", says)
    expect(version_row(page, newest - 1)).to_contain_text("serving")
    expect(page.get_by_text("held", exact=True)).to_be_visible()
    wait_until(lambda: _served(demo) == {newest - 1})
    act(page, f"Promote version {newest}", f"Promote {newest}", f"2 servers load version {newest}")
    expect(version_row(page, newest)).to_contain_text("serving")
    wait_until(lambda: _served(demo) == {newest})
    page.get_by_role("button", name="Hold…").click()
    page.get_by_label("Reason").fill("a look at the demo")
    page.get_by_role("button", name="Hold", exact=True).click()
    expect(page.get_by_text("A look at the demo.")).to_be_visible()
    act(page, "Release…", "Release", "The hold ends.")
    expect(page.get_by_text("New versions are pushed by themselves.")).to_be_visible()


def test_a_version_is_pinned_and_a_server_drained(demo: DemoRun, tab: Tab) -> None:
    older = demo.serving() - 1
    page = at(demo, tab, "#/policies")
    servers = page.get_by_role("table", name="Rollout servers")
    act(page, f"Pin version {older}", "Pin", f"keep version {older} for calls that name it")
    expect(servers).to_contain_text(f"pinned to {older}")
    wait_until(lambda: _served(demo) == {older, older + 1})
    act(page, f"Unpin version {older}", "Unpin", "follow the fleet again")
    expect(servers).not_to_contain_text(f"pinned to {older}")
    wait_until(lambda: _served(demo) == {older + 1})
    row = servers.get_by_role("row").filter(has_text=SECOND)
    act(page, f"Drain {SECOND}", "Drain", f"{SECOND} gets no new calls, and no pushes.")
    expect(row).to_contain_text("drained")
    act(page, f"Resume {SECOND}", "Resume", f"{SECOND} takes calls again")
    expect(row).to_contain_text("ready")


def test_the_trainer_is_paused_resumed_and_writes_a_checkpoint(demo: DemoRun, tab: Tab) -> None:
    page = at(demo, tab, "#/policies")
    trainer = page.get_by_role("region", name="Trainer")
    act(page, "Pause…", "Pause", "The training pauses before its next step.")
    expect(trainer).to_contain_text("paused")
    wait_until(lambda: demo.trainer()["state"] == "paused")
    act(page, "Checkpoint…", "Write it", "after the running step")
    expect(page.get_by_text("The checkpoint is durable.")).to_be_visible()
    trainer.get_by_role("button", name="Resume…").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume", exact=True).click()
    wait_until(lambda: demo.trainer()["state"] == "waiting")


def test_a_canary_is_begun_and_rolled_back(demo: DemoRun, tab: Tab) -> None:
    """The last of these tests: a version that a canary has rolled back is not pushed again."""
    newest = demo.serving()
    demo.ask("/admin/policies/rollback", "POST", to=newest - 1, hold=True)
    wait_until(lambda: _served(demo) == {newest - 1})
    page = at(demo, tab, "#/policies")
    promotes = f"Its gates then promote it, or roll it back to version {newest - 1}."
    act(page, f"Canary of version {newest}", "Begin the canary", promotes)
    canary = page.get_by_role("region", name=f"Canary of version {newest}")
    expect(canary).to_contain_text("KL divergence from the served version")
    wait_until(lambda: _served(demo) == {newest - 1, newest})
    canary.get_by_role("button", name="Roll back…").click()
    page.get_by_role("button", name="Roll it back", exact=True).click()
    expect(canary).to_be_hidden()
    expect(version_row(page, newest)).to_contain_text("failed")
    wait_until(lambda: _served(demo) == {newest - 1})


def _served(demo: DemoRun) -> set[int]:
    """What the servers serve."""
    return {each["version"] for each in demo.ask("/admin/rollout_servers")["data"]}
