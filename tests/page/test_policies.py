"""The view Policies: the life of versions, and each action with its question, its effect, and its refusal."""

import re

from playwright.sync_api import expect

from tests.support.page.browser import Tab, Watched
from tests.support.page.deployment import ShownDeployment
from tests.support.page.dialogs import act, version_row
from tests.support.waiting import wait_until


def open_policies(shown: ShownDeployment, tab: Tab) -> Watched:
    watched = tab(f"{shown.gateway.url}/#/policies")
    expect(watched.tab.get_by_role("heading", name="Last pushes")).to_be_visible()
    return watched


def plan(shown: ShownDeployment) -> dict[str, object]:
    found: dict[str, object] = shown.admin("GET", "/admin/policies/serving")
    return found


def test_versions_are_promoted_rolled_back_held_and_released(shown: ShownDeployment, tab: Tab) -> None:
    for number in (1, 2):
        shown.publish(number)
    wait_until(lambda: plan(shown)["serving"] == 2)
    page = open_policies(shown, tab).tab
    expect(version_row(page, 2)).to_contain_text("serving")
    act(
        page,
        "Roll back to version 1",
        "Roll back to 1",
        "Every server loads version 1 again, in place of version 2.",
    )
    expect(version_row(page, 1)).to_contain_text("serving")
    expect(page.get_by_text("held", exact=True)).to_be_visible()
    assert plan(shown)["hold"]
    shown.publish(3)
    expect(version_row(page, 3)).to_contain_text("published")
    act(page, "Promote version 3", "Promote 3", "3 servers load version 3, a few at a time")
    expect(version_row(page, 3)).to_contain_text("serving")
    expect(page.get_by_text("New versions are pushed by themselves.")).to_be_visible()
    page.get_by_role("button", name="Hold…").click()
    page.get_by_label("Reason").fill("a look at version 3")
    page.get_by_role("button", name="Hold", exact=True).click()
    expect(page.get_by_text("A look at version 3.")).to_be_visible()
    act(page, "Release…", "Release", "The hold ends.")
    wait_until(lambda: plan(shown)["hold"] is None)


def test_a_canary_is_begun_and_rolled_back(shown: ShownDeployment, tab: Tab) -> None:
    shown.admin("POST", "/admin/policies/hold", {})
    shown.publish(1)
    page = open_policies(shown, tab).tab
    act(
        page,
        "Canary of version 1",
        "Begin the canary",
        "Its gates then promote it, or roll it back to version 0.",
    )
    canary = page.get_by_role("region", name="Canary of version 1")
    expect(canary).to_contain_text("KL divergence from the served version")
    expect(canary).to_contain_text("at most 0.1 nats a token")
    expect(version_row(page, 1)).to_contain_text("canary")
    canary.get_by_role("button", name="Roll back…").click()
    page.get_by_role("button", name="Roll it back", exact=True).click()
    expect(canary).to_be_hidden()
    expect(page.get_by_role("region", name="Last canaries")).to_contain_text("rolled back")
    expect(version_row(page, 1)).to_contain_text("failed")


def test_versions_are_pinned_and_servers_drained(shown: ShownDeployment, tab: Tab) -> None:
    shown.publish(1)
    wait_until(lambda: plan(shown)["serving"] == 1)
    page = open_policies(shown, tab).tab
    act(page, "Pin version 0", "Pin", "keep version 0 for calls that name it")
    servers = page.get_by_role("table", name="Rollout servers")
    expect(servers).to_contain_text("pinned to 0")
    act(page, "Unpin version 0", "Unpin", "follow the fleet again")
    expect(servers).not_to_contain_text("pinned to 0")
    act(page, "Drain rollout-1", "Drain", "rollout-1 gets no new calls, and no pushes.")
    expect(servers.get_by_role("row").filter(has_text="rollout-1")).to_contain_text("drained")
    act(page, "Resume rollout-1", "Resume", "rollout-1 takes calls again")
    expect(servers.get_by_role("row").filter(has_text="rollout-1")).to_contain_text("ready")


def test_a_refusal_is_shown_in_the_dialog_in_the_gateways_words(shown: ShownDeployment, tab: Tab) -> None:
    watched = open_policies(shown, tab)
    watched.expected.append("status of 503")
    page = watched.tab
    page.get_by_role("button", name="Pause…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Pause", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("the trainer at http://127.0.0.1:9 does not answer")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_a_push_shows_what_each_server_does(shown: ShownDeployment, tab: Tab) -> None:
    shown.servers["rollout-1"].part.refuse = True
    shown.publish(1)
    page = open_policies(shown, tab).tab
    push = page.get_by_role("region", name="Push of version 1")
    row = push.get_by_role("row").filter(has_text="rollout-1")
    expect(row).to_contain_text("refused")
    expect(row).to_contain_text("a tensor is missing")
    expect(push.get_by_role("row").filter(has_text="rollout-0")).to_contain_text("proved")


def test_the_number_that_the_trainer_reserved_is_shown(shown: ShownDeployment, tab: Tab) -> None:
    shown.publish(1)
    shown.gateway.redis.hset("weir:policy_reserved", mapping={"version": 2, "location": "file:///v2"})
    page = open_policies(shown, tab).tab
    expect(version_row(page, 2)).to_contain_text(re.compile("reserved"))
    expect(version_row(page, 2).get_by_role("button")).to_have_count(0)
