"""Hostile texts: names of servers, locations, reasons, errors and warnings stay texts in every view."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from rollout_queue.redis import keys
from tests.support.gateway.running import ADMIN_KEY, Backends
from tests.support.page.browser import Tab
from tests.support.page.deployment import ShownDeployment, shown_deployment

MARKUP = '"><img src=x onerror="window.hurt=1"><script>window.hurt=1</script><svg onload=window.hurt=1>'
LINK = "javascript:window.hurt=1"
NODE = {"type": "img", "props": {"src": "x", "onerror": "window.hurt=1"}, "__v": 0, "constructor": None}
"""What a template library would take for an element, if it came from its own function."""
LONG = "W" * 3000


@pytest.fixture(scope="module")
def hostile(backends: Backends) -> Iterator[ShownDeployment]:
    with shown_deployment(backends) as shown:
        shown.report(waiting_for=MARKUP, state=MARKUP[:60], metrics={"reward_mean": 1.0, MARKUP: 2.0})
        for name, value in (("note", NODE), ("step", NODE), ("version", MARKUP)):
            shown.gateway.redis.hset(keys.TRAINER, name, json.dumps(value))
        shown.gateway.redis.xadd(keys.DEAD_LETTERS, {"error": MARKUP + LONG})
        shown.publish(1, location=f"http://h/{MARKUP}")
        shown.publish(2, location=LINK)
        shown.servers["rollout-0"].part.nonsense = {"ok": False, "error": {"message": MARKUP}}
        shown.publish(3, location=f"file:///{LONG}")
        shown.admin("POST", "/admin/policies/hold", {"reason": MARKUP})
        register(shown, MARKUP[:150])
        register(shown, LINK)
        yield shown


def register(shown: ShownDeployment, name: str) -> None:
    """A server whose name is hostile; its state is unknown, because nobody is there."""
    body = {"id": name, "url": "http://127.0.0.1:9", "engine_url": "http://127.0.0.1:9"}
    reply = shown.gateway.post("/admin/rollout_servers", body, key=ADMIN_KEY)
    if reply.status_code != 200:  # the contract does not take such a name, so it is written behind its back
        shown.gateway.redis.hset(keys.SERVERS, name, json.dumps(body))


def unhurt(page: Page) -> None:
    assert page.evaluate("window.hurt") is None
    found: dict[str, Any] = page.evaluate(
        """() => ({
            scripts: document.querySelectorAll("#app script, #app iframe, #app img, #app [onerror]").length,
            links: [...document.querySelectorAll("a")].map((each) => each.protocol),
        })"""
    )
    assert found["scripts"] == 0
    assert set(found["links"]) == {"http:"}


def test_hostile_texts_are_shown_as_texts(hostile: ShownDeployment, tab: Tab) -> None:
    page = tab(hostile.gateway.url).tab
    expect(page.locator(".lead")).to_contain_text(MARKUP)
    expect(page.get_by_role("list", name="Warnings")).to_contain_text(MARKUP)
    unhurt(page)
    page.get_by_role("link", name="Policies", exact=True).click()
    expect(page.get_by_role("table", name="Versions, the newest first")).to_contain_text(MARKUP)
    expect(page.get_by_role("table", name="Rollout servers")).to_contain_text(MARKUP[:150])
    expect(page.locator(".held")).to_contain_text(MARKUP)
    unhurt(page)
    page.get_by_role("button", name=f"Drain {LINK}").click()
    expect(page.get_by_role("dialog")).to_contain_text(f"{LINK} gets no new calls")
    unhurt(page)
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) <= 0


@pytest.mark.parametrize(
    "fragment",
    [
        "<img src=x onerror=window.hurt=1>",
        "/now/%3Cscript%3E",
        "/%E0%A4%A",
        "/policies?x=%00",
        "/__proto__",
        "//evil.example",
    ],
)
def test_a_hostile_address_shows_a_view_or_says_that_there_is_none(
    hostile: ShownDeployment, tab: Tab, fragment: str
) -> None:
    page = tab(f"{hostile.gateway.url}/#{fragment}").tab
    expect(page.get_by_role("heading", level=1)).to_have_text(
        ("Now", "Policies", "Not found").__getitem__(
            0 if "now" in fragment else 1 if "policies" in fragment else 2
        )
    )
    unhurt(page)


def test_the_browser_refuses_markup_from_a_string(hostile: ShownDeployment, tab: Tab) -> None:
    """The second line of defence: the page's policy."""
    watched = tab(hostile.gateway.url)
    watched.expected += ["TrustedHTML", "Content Security Policy", "blocked", "violates"]
    refused = watched.tab.evaluate(
        """() => { try { document.body.innerHTML = "<b>x</b>"; return false; } catch { return true; } }"""
    )
    assert refused
    watched.tab.evaluate(
        """() => {
            const image = document.createElement("img");
            image.src = "https://evil.example/x";
            document.body.append(image);
            return fetch("https://evil.example/").catch(() => null);
        }"""
    )
    assert len(watched.complaints) >= 3
    watched.hosts.clear()  # Chromium tells of requests that it does not send
