"""The views of lineage and learning: from a reward to a version and back; curves, limits and other runs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.gateway.running import Backends
from tests.support.page.browser import Tab, go
from tests.support.page.deployment import ShownDeployment, shown_deployment
from tests.support.page.learned import GROUP, SESSION, TALK, fill_sessions, trainer_with_curves
from tests.support.page.looks import LOOKS, overflow, too_wide, violations
from tests.support.page.run_metrics import metrics_of

VIEWS = {
    "#/sessions": "table",
    f"#/sessions/{SESSION}?colour=advantage&with=train-times-1": ".tokens",
    "#/sessions/hostile": ".tokens",
    f"#/sessions/{TALK}": ".call",
    "#/lineage": "table",
    f"#/lineage/groups/{GROUP}": ".advantages",
    "#/lineage/12": "table",
    "#/learning": ".u-over",
}


@pytest.fixture(scope="module")
def learned(backends: Backends, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShownDeployment]:
    with shown_deployment(backends, servers=1) as shown:
        fill_sessions(shown)
        shown.admin("POST", "/admin/policies/12/promote")
        with trainer_with_curves(shown, tmp_path_factory.mktemp("run")):
            yield shown


def at(learned: ShownDeployment, tab: Tab, place: str) -> Page:
    return go(tab(learned.gateway.url).tab, place)


@pytest.mark.parametrize(("theme", "size"), LOOKS)
def test_axe_finds_nothing_in_the_views_of_data(
    learned: ShownDeployment, tab: Tab, theme: str, size: tuple[int, int]
) -> None:
    page = tab(learned.gateway.url, size=size, dark=theme == "dark").tab
    for place, drawn in VIEWS.items():
        expect(go(page, place).locator(f"main {drawn}").first).to_be_visible()
        assert not violations(page), place
        assert overflow(page) <= 0, place


def test_the_views_of_data_fit_at_every_width(learned: ShownDeployment, tab: Tab) -> None:
    page = tab(learned.gateway.url).tab
    for place, drawn in VIEWS.items():
        page.set_viewport_size({"width": 1440, "height": 800})
        expect(go(page, place).locator(f"main {drawn}").first).to_be_visible()
        assert not too_wide(page, (1440, 1100, 1099, 1001, 1000, 900, 768, 600, 480, 390, 360, 320)), place


def test_a_reward_leads_to_a_version_and_back(learned: ShownDeployment, tab: Tab) -> None:
    page = at(learned, tab, f"#/lineage/groups/{GROUP}")
    members = learned.admin("GET", f"/admin/groups/{GROUP}")["members"]
    advantage = next(each["advantage"] for each in members if each["session_id"] == SESSION)
    expect(page.locator(".advantages")).to_contain_text(f"0.625 = 0.375, advantage {advantage:.3g}")
    page.get_by_role("link", name="version 12").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Version 12")
    taught = page.get_by_role("table", name="Turns that taught the version")
    expect(taught.get_by_role("row")).to_have_count(13)
    taught.get_by_role("link", name=SESSION).first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Session {SESSION}")
    page.get_by_role("link", name="Version 12, which learned from it in step 96").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Version 12")


def test_a_group_a_session_or_a_version_is_found_by_name(learned: ShownDeployment, tab: Tab) -> None:
    watched = tab(learned.gateway.url)
    watched.expected.append("status of 404")
    page = go(watched.tab, "#/lineage")
    page.get_by_label("Its id or number").fill(GROUP)
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Group {GROUP}")
    go(page, "#/lineage/groups/none")
    expect(page.get_by_role("alert")).to_contain_text("No session of a group with this name is known.")


def test_the_curves_of_a_run_are_drawn_with_the_limits_of_guards(learned: ShownDeployment, tab: Tab) -> None:
    page = at(learned, tab, "#/learning")
    kl = page.get_by_role("region", name="mismatch/kl_current")
    expect(kl).to_contain_text("Guard max_kl: between -0.2 and 0.2.")
    expect(kl.locator("canvas")).to_be_visible()
    expect(kl.get_by_role("img")).to_have_attribute(
        "aria-label", re.compile(r"^mismatch/kl_current: steps 1 to .*Set back after step 1.500 to")
    )
    happened = page.get_by_role("region", name="What happened")
    expect(happened).to_contain_text("Set back after step 1,500 to version 1,400")
    expect(happened).to_contain_text("The trainer restarted after step 2,200.")
    expect(happened).to_contain_text("Version 12 of step 96 was promoted by an operator")
    expect(kl).to_contain_text("steps 1 to")
    page.get_by_text("Steps: all").click()
    page.get_by_label("From step").fill("1900")
    page.get_by_label("To step").fill("2100")
    page.get_by_role("button", name="Show").click()
    expect(kl).to_contain_text("steps 1,900 to 2,100")
    assert page.url.endswith("from=1900&to=2100")
    page.get_by_label("Smoothing").select_option("strong")
    assert page.url.endswith("from=1900&to=2100&smooth=0.9")
    page.reload()
    expect(page.get_by_label("Smoothing")).to_have_value("0.9")
    page.get_by_role("button", name="All steps").click()
    expect(kl).to_contain_text("steps 1 to")


def test_each_task_has_a_curve_of_its_reward(learned: ShownDeployment, tab: Tab) -> None:
    page = at(learned, tab, "#/learning")
    tasks = page.get_by_role("region", name="reward/task")
    for name in ("sums", "tool"):
        expect(tasks.locator(".keys")).to_contain_text(f"{name}: steps ")
    page.get_by_text("Metrics: 8 of").click()
    page.get_by_label("reward/task/sums").check()
    expect(page.get_by_role("region", name="reward/task/sums")).to_contain_text("Reward of sums")


TICKS = """async (lists) => {
    const app = document.querySelector("script[type=module]").src;
    const axes = await import(app.replace("app.js", "views/curves/axes.js"));
    return lists.map(([ticks, range]) => [axes.tickTexts(ticks), axes.rangeOf(...range)]);
}"""


def test_axes_fit_their_values(learned: ShownDeployment, tab: Tab) -> None:
    """No tick is cut, neighbours differ, and a constant has an axis around itself."""
    page = at(learned, tab, "#/learning?m=reward_mean")
    steps = (1, 2, 2.5, 5)
    lists = [
        [[at * step * 10.0**power for at in range(-3, 4)], [-(10.0**power), 3 * 10.0**power]]
        for step in steps
        for power in range(-12, 13)
    ]
    for (ticks, _), (texts, (low, high)) in zip(lists, page.evaluate(TICKS, lists), strict=True):
        assert len(set(texts)) == len(ticks), texts
        assert all(len(text) <= 9 for text in texts), texts
        read = [float(text.replace("\u2212", "-").replace(",", "")) for text in texts]
        assert read == pytest.approx(ticks, rel=1e-6, abs=1e-30), texts
        assert low < high
    constants = page.evaluate(
        TICKS, [[[0], [0, 0]], [[0], [-2.5e-8, -2.5e-8]], [[0], [7, 7]], [[0], [0.2, 1]]]
    )
    assert [found for _, found in constants[::2]] == [[0, 1], [5.25, 8.75]]
    assert constants[1][1][0] < -2.5e-8 < constants[1][1][1] < 0
    assert constants[3][1][0] == 0, "0 is near"


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("#/learning?smooth=7&x=1", "ignores it: smooth=7, x=1."),
        ("#/sessions?verdict=trained&reward=1", "ignores it: reward=1."),
        (f"#/sessions/{SESSION}?colour=red", "ignores it: colour=red."),
        ("#/sessions/a/b/c", "Sessions has nothing at “a/b/c”."),
        ("#/policies/12", "Policies has nothing at “12”."),
        ("#/lineage/twelve", "Lineage has nothing at “twelve”."),
        ("#/nowhere", "There is no view of this name"),
    ],
)
def test_what_is_unknown_in_an_address_is_said(
    learned: ShownDeployment, tab: Tab, place: str, says: str
) -> None:
    page = at(learned, tab, place)
    expect(page.get_by_role("main")).to_contain_text(says)


def test_a_kept_run_is_drawn_beside_this_one(learned: ShownDeployment, tab: Tab) -> None:
    page = at(learned, tab, "#/learning?m=reward_mean")
    page.get_by_text("Other runs: none shown").click()
    page.get_by_role("checkbox", name="older/metrics.jsonl").check()
    reward = page.get_by_role("region", name="reward_mean")
    expect(reward).to_contain_text("older/metrics.jsonl: steps 1 to 400")
    page.reload()
    expect(page.get_by_role("region", name="reward_mean")).to_contain_text(
        "older/metrics.jsonl: steps 1 to 400"
    )
    page.get_by_role("checkbox", name="older/metrics.jsonl").uncheck()
    expect(reward).not_to_contain_text("older/")


def test_another_run_is_drawn_beside_and_both_are_saved(
    learned: ShownDeployment, tab: Tab, tmp_path: Path
) -> None:
    page = at(learned, tab, "#/learning?m=reward_mean")
    page.get_by_text("Other runs: none shown").click()
    path = tmp_path / "<b>other.jsonl"
    lines = [json.dumps(metrics_of(step, lift=0.1)) for step in range(1, 501)]
    path.write_text("\n".join([*lines[:100], '{"step": "half', *lines[100:]]), encoding="utf-8")
    page.get_by_label("Files (at most 3)").set_input_files(path)
    reward = page.get_by_role("region", name="reward_mean")
    expect(reward).to_contain_text("<b>other.jsonl: steps 1 to 500")
    with page.expect_download() as csv:
        reward.get_by_role("button", name="CSV of reward_mean").click()
    rows = Path(csv.value.path()).read_text(encoding="utf-8").splitlines()
    assert rows[0] == "run,step,min,mean,max"
    assert {row.split(",")[0] for row in rows[1:]} == {'"this run"', '"<b>other.jsonl"'}
    with page.expect_download() as png:
        reward.get_by_role("button", name="PNG of reward_mean").click()
    assert png.value.suggested_filename == "reward_mean.png"
    assert Path(png.value.path()).read_bytes().startswith(b"\x89PNG")
    page.get_by_role("button", name="Remove <b>other.jsonl").click()
    expect(reward).not_to_contain_text("other.jsonl")


def test_a_file_that_is_no_run_is_refused_in_words(
    learned: ShownDeployment, tab: Tab, tmp_path: Path
) -> None:
    page = at(learned, tab, "#/learning?m=loss")
    page.get_by_text("Other runs: none shown").click()
    path = tmp_path / "no.jsonl"
    path.write_text("[]\n{}\nnothing", encoding="utf-8")
    page.get_by_label("Files (at most 3)").set_input_files(path)
    expect(page.get_by_role("alert")).to_have_text("The file has no line with a step.")
