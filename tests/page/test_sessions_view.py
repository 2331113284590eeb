"""The views of sessions and tokens: search, a tree of turns, coloured tokens, two sessions side by side."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Span
from tests.support.gateway.running import CLIENT_KEY, OTHER_KEY, Backends
from tests.support.page.browser import PHONE, Tab, go
from tests.support.page.deployment import ShownDeployment, shown_deployment
from tests.support.page.learned import ANSWER, SESSION, TALK, fill_sessions, put_turn
from tests.support.waiting import wait_until

LONG = 120_000
"""Tokens of the context of one long turn."""


@pytest.fixture(scope="module")
def filled(backends: Backends) -> Iterator[ShownDeployment]:
    with shown_deployment(backends, servers=1) as shown:
        fill_sessions(shown)
        shown.gateway.session(session_id="long")
        tokens = {"context_ids": TokenIds([45] * LONG), "versions": (Span(1, 0, 2),)}
        output = {"output_ids": TokenIds([46, 47]), "logprobs": Logprobs([-1.0, -2.0])}
        put_turn(shown, "long", "long-a", "", **tokens, **output)
        yield shown


def at(filled: ShownDeployment, tab: Tab, place: str) -> Page:
    return go(tab(filled.gateway.url).tab, place)


def numbers(page: Page) -> str:
    return page.locator(".token-numbers").first.inner_text()


def test_sessions_are_searched_and_the_address_has_the_search(filled: ShownDeployment, tab: Tab) -> None:
    page = at(filled, tab, "#/sessions")
    expect(page.get_by_role("row")).to_have_count(11)
    page.get_by_label("Task").fill("train-times")
    page.get_by_label("Reward from").fill("0.5")
    page.get_by_label("Reward from").press("Enter")
    expect(page.get_by_role("row")).to_have_count(4)
    assert page.url.endswith("#/sessions?task_id=train-times&min_reward=0.5")
    expect(page.get_by_text("3 sessions found, the newest first.")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Task")).to_have_value("train-times")
    page.get_by_role("link", name=SESSION).focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Session {SESSION}")
    page.go_back()
    expect(page.get_by_role("row")).to_have_count(4)


def test_a_session_opens_with_its_conversation(filled: ShownDeployment, tab: Tab) -> None:
    page = at(filled, tab, f"#/sessions/{TALK}")
    messages = page.locator(".message")
    expect(messages).to_have_count(5)
    roles = [each.get_attribute("data-role") for each in messages.all()]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    expect(messages.nth(1)).to_contain_text("How hot is it?\n<img src=x onerror=alert(1)>[U+202E]gnp.exe")
    seen = page.locator(".message img")
    expect(seen).to_have_attribute("alt", re.compile("^Image, 96 . 64$"))
    wait_until(lambda: seen.evaluate("each => each.naturalWidth") == 96)
    expect(messages.nth(2)).to_contain_text("Calls weather")
    expect(messages.nth(2).get_by_text("I look.")).to_be_hidden()
    messages.nth(2).get_by_text("Thought, 2 words").click()
    expect(messages.nth(2).get_by_text("I look.")).to_be_visible()
    result = messages.nth(3)
    assert len(result.locator(".text").inner_text()) < 1000, "a long text is folded"
    result.get_by_role("button", name="Show all 4,799 characters").click()
    assert len(result.locator(".text").inner_text()) > 4000
    expect(messages.nth(4)).to_contain_text("It is 31 °C in Ulm.")
    first, tokens = (page.locator(each).bounding_box() for each in (".conversation", ".tokens"))
    assert first is not None
    assert tokens is not None
    assert first["y"] < tokens["y"], "the tokens come second"
    messages.nth(4).get_by_role("link", name="Turn 2").click()
    expect(page.get_by_role("region", name="Tokens of turn 2")).to_be_in_viewport()


def test_the_rows_of_a_session_are_conversations(filled: ShownDeployment, tab: Tab) -> None:
    page = at(filled, tab, f"#/sessions/{SESSION}")
    expect(page.locator(".message")).to_have_count(4)
    page.get_by_label("Row that is shown").select_option("2, from turn 3")
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator(".message").last).to_contain_text("165")
    go(page, f"#/sessions/{SESSION}/none")
    expect(page.get_by_role("alert")).to_contain_text("This session has no turn none.")


def test_the_list_shows_questions_and_answers_and_short_ids(filled: ShownDeployment, tab: Tab) -> None:
    page = at(filled, tab, "#/sessions")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=TALK))
    expect(row.locator(".question")).to_contain_text("How hot is it?")
    expect(row.locator(".answer")).to_have_text("It is 31 °C in Ulm.")
    expect(row.locator("a.mono [aria-hidden]")).to_have_text("talk-of-t…n-ulm")
    phone = tab(filled.gateway.url, size=PHONE).tab
    go(phone, "#/sessions")
    expect(phone.get_by_role("link", name=TALK)).to_be_visible()
    expect(phone.get_by_label("Task")).to_be_hidden()
    go(phone, "#/sessions?task_id=talk")
    expect(phone.get_by_label("Task")).to_have_value("talk")


def test_a_session_shows_its_tree_and_why_a_row_splits(filled: ShownDeployment, tab: Tab) -> None:
    page = at(filled, tab, f"#/sessions/{SESSION}")
    turns = page.get_by_role("table", name="Turns of the session")
    expect(turns.get_by_role("row")).to_have_count(5)
    expect(turns.get_by_role("row").nth(2)).to_contain_text("Row 1")
    expect(turns.get_by_role("row").nth(3)).to_contain_text("Row 2")
    expect(turns.get_by_role("row").nth(3)).to_contain_text("the call begins as an earlier one does")
    expect(turns.get_by_role("row").nth(4)).to_contain_text("Its answer is not whole")


def test_each_token_has_its_numbers_for_pointer_and_keys(filled: ShownDeployment, tab: Tab) -> None:
    page = at(filled, tab, f"#/sessions/{SESSION}?colour=advantage")
    tokens = page.get_by_role("region", name="Tokens of turn 1")
    expect(tokens.locator(".tok.current")).to_have_text("F")
    assert "Advantage" in numbers(page)
    assert "Version 11" in numbers(page).replace("\n", " ")
    tokens.locator(".tok").last.hover()
    assert "Version 12" in numbers(page).replace("\n", " ")
    tokens.focus()
    page.keyboard.press("Home")
    assert "It is context" in numbers(page)
    page.keyboard.press("ArrowRight")
    expect(tokens.locator(".tok.current")).to_have_attribute("data-i", "1")
    said = "".join(tokens.locator(".tok").all_inner_texts()).replace("␣", " ")
    assert ANSWER in said
    expect(page.locator(".legend")).to_contain_text("0.188 and more")


@pytest.mark.parametrize(
    ("colour", "legend"),
    [
        ("logprob", "99 % and more"),
        ("version", "version 12"),
        ("mask", "sampled by the model"),
        ("ratio", "1.25 to 2"),
        ("verdict", "trained"),
    ],
)
def test_tokens_are_coloured_by_what_is_chosen(
    filled: ShownDeployment, tab: Tab, colour: str, legend: str
) -> None:
    page = at(filled, tab, f"#/sessions/{SESSION}")
    page.get_by_label("Colour by").select_option(colour)
    expect(page.locator(".legend li", has_text=legend).first).to_be_visible()
    assert f"colour={colour}" in page.url


def test_two_members_of_a_group_are_side_by_side(filled: ShownDeployment, tab: Tab) -> None:
    page = at(filled, tab, f"#/sessions/{SESSION}")
    page.get_by_role("button", name=re.compile("Beside this one ?: train-times-1")).click()
    expect(page.locator(".tokens")).to_have_count(2)
    expect(page.locator(".other-head")).to_contain_text("reward 0")
    page.locator(".other-head select").select_option(label="2")
    expect(page.get_by_role("region", name="Tokens of turn 2 of session train-times-1")).to_be_visible()
    page.get_by_role("button", name="Close").click()
    expect(page.locator(".tokens")).to_have_count(1)


def test_a_session_says_why_it_is_not_trained(filled: ShownDeployment, tab: Tab) -> None:
    page = at(filled, tab, "#/sessions/equal-0?colour=verdict")
    why = "All 2 rewards of its group are 0.25, so its advantage is 0."
    expect(page.get_by_role("region", name="Verdict")).to_contain_text(why)
    expect(page.locator(".legend")).to_contain_text(why)


def test_a_long_turn_is_shown_in_parts(filled: ShownDeployment, tab: Tab) -> None:
    page = at(filled, tab, "#/sessions/long")
    expect(page.get_by_text("of 120,002: 120,000 of context, 2 sampled")).to_be_visible()
    assert page.locator(".tok[data-i]").count() <= 2000
    page.get_by_role("button", name="Context", exact=True).click()
    expect(page.get_by_text("Tokens 0 to 2,000")).to_be_visible()
    page.get_by_role("button", name="Later tokens").click()
    expect(page.get_by_text("Tokens 2,000 to 4,000")).to_be_visible()
    assert page.locator(".tok[data-i]").count() == 2000


def test_a_client_key_sees_its_own_sessions_only(filled: ShownDeployment, tab: Tab) -> None:
    page = tab(filled.gateway.url, CLIENT_KEY).tab
    expect(page.get_by_role("heading", level=1)).to_have_text("Sessions")
    expect(page.get_by_role("row")).to_have_count(11)
    expect(page.get_by_role("link", name="Lineage")).to_have_count(0)
    other = tab(filled.gateway.url, OTHER_KEY).tab
    expect(other.get_by_text("No session matches.")).to_be_visible()
