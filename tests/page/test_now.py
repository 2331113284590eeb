"""The page's frame and its first view, Now: what it says, and that it is live."""

from playwright.sync_api import expect

from tests.support.page.browser import Tab
from tests.support.page.deployment import ShownDeployment
from tests.support.page.dialogs import act


def test_an_admin_signs_in_and_sees_the_first_view(shown: ShownDeployment, tab: Tab) -> None:
    page = tab(shown.gateway.url).tab
    expect(page.get_by_role("heading", level=1)).to_have_text("Now")
    expect(page).to_have_title("Now · Weir")
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    page.get_by_role("link", name="Policies").click()
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    assert page.url.endswith("#/policies")


def test_now_says_what_is_waited_for_and_follows_the_deployment(shown: ShownDeployment, tab: Tab) -> None:
    page = tab(shown.gateway.url).tab
    expect(page.get_by_text("The trainer waits for 3 more groups: 5 of 8 are complete.")).to_be_visible()
    reward = page.locator(".stat", has_text="Reward")
    expect(reward).to_contain_text("0.613")
    expect(page.locator(".stat", has_text="Staleness")).to_contain_text("0.84")
    expect(page.get_by_role("row").filter(has_text="rollout-0")).to_contain_text("ready")
    counted = "of the sessions read, 3 are unfinished; 1 group waits for 2 unfinished members"
    rows, more = "32 rows with an advantage, of which 4 are here", "a version waits for the gateway"
    shown.report(waiting_for=f"{rows}; {counted}; the oldest has waited 7 s; {more}")
    lead = f"The trainer waits for {rows}; {more}."
    expect(page.locator(".lead")).to_have_text(lead)
    shown.report(step=97, waiting_for="the end of its step", state="training", metrics={"reward_mean": 0.75})
    expect(page.get_by_text("The trainer waits for the end of its step.")).to_be_visible()
    expect(reward).to_contain_text("0.75")
    expect(reward).to_contain_text("step 97")
    shown.publish(1)
    expect(page.locator(".stat", has_text="Version served")).to_contain_text("1")
    shown.admin("POST", "/admin/rollout_servers/rollout-1/drain")
    expect(page.get_by_role("row").filter(has_text="rollout-1")).to_contain_text("drained")
    expect(page.get_by_text("2 of 3 servers can take calls.")).to_be_visible()


def test_now_shows_warnings_and_the_lack_of_a_trainer(shown: ShownDeployment, tab: Tab) -> None:
    shown.gateway.redis.delete("weir:trainer")
    shown.gateway.redis.xadd("weir:dead", {"error": "not a record"})
    page = tab(shown.gateway.url).tab
    lead = "No trainer has reported yet: nothing is trained before one does."
    expect(page.locator(".lead")).to_have_text(lead)
    warnings = page.get_by_role("list", name="Warnings")
    expect(warnings).to_contain_text("The trainer could not read 1 record")
    expect(page.get_by_text("No trainer has reported yet")).to_have_count(1)


def test_what_can_be_done_is_a_button_beside_what_needs_it(shown: ShownDeployment, tab: Tab) -> None:
    shown.report(state="paused", waiting_for="POST /resume, since the reward of task sums fell to 0.1")
    shown.admin("POST", "/admin/policies/hold", {"reason": "version 13 is tried first"})
    watched = tab(shown.gateway.url)
    watched.expected.append("status of 503")
    page = watched.tab
    expect(page.locator(".lead")).to_have_text(
        "The training is paused, since the reward of task sums fell to 0.1."
    )
    expect(page.get_by_text("the reward of task sums fell")).to_have_count(1)
    expect(page.get_by_text("POST /")).to_have_count(0)
    page.get_by_role("button", name="Resume…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("The training goes on with what waits for it")
    dialog.get_by_role("button", name="Resume", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("does not answer")
    page.keyboard.press("Escape")
    expect(page.get_by_text("The fleet keeps version 0: version 13 is tried first.")).to_be_visible()
    act(page, "Release…", "Release", "The hold ends")
    expect(page.get_by_text("The fleet keeps version")).to_be_hidden()


def test_a_tab_that_nobody_sees_has_no_stream(shown: ShownDeployment, tab: Tab) -> None:
    page = tab(shown.gateway.url).tab
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    feed_ended = """() => {
      Object.defineProperty(document, "hidden", {value: true, configurable: true});
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/page/events")):
        page.evaluate(feed_ended)
    back = feed_ended.replace("value: true", "value: false")
    with page.expect_event("request", lambda request: request.url.endswith("/page/events")):
        page.evaluate(back)
