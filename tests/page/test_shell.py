"""The page's frame: it opens, signs in and out, and shows its views by their addresses."""

from playwright.sync_api import expect

from tests.support.page.browser import Tab
from tests.support.page.deployment import ShownDeployment


def test_an_admin_signs_in_and_sees_the_first_view(shown: ShownDeployment, tab: Tab) -> None:
    page = tab(shown.gateway.url).tab
    expect(page.get_by_role("heading", level=1)).to_have_text("Now")
    expect(page).to_have_title("Now · Weir")
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    page.get_by_role("link", name="Policies").click()
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    assert page.url.endswith("#/policies")
