"""The actions of the view Policies, as a user takes them."""

from playwright.sync_api import Locator, Page, expect


def version_row(page: Page, number: int) -> Locator:
    table = page.get_by_role("table", name="Versions, the newest first")
    return table.get_by_role("row").filter(has=page.get_by_role("cell", name=str(number), exact=True))


def act(page: Page, button: str, confirm: str, says: str) -> None:
    """Press a button, read the question, and confirm it."""
    page.get_by_role("button", name=button, exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(says)
    dialog.get_by_role("button", name=confirm, exact=True).click()
    expect(dialog).to_be_hidden()
