"""Takes the screenshots of docs/page, of a real run of the demo: `make page-shots`."""

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Locator, Page

from tests.support.page.browser import PHONE, WIDE, chromium, context_of, go, watched_tab
from tests.support.page.demo_run import ADMIN_KEY, DemoRun, demo_run
from tests.support.threads import meanwhile

COLOURS = 96
OUT = Path(__file__).parents[3] / "docs/page"
GISTS_MS = 3_000
"""How long a list is seen, so that its rows have their questions and answers."""
LOOKS_MS = 30_000
"""How long the view Now is open before its picture, so that its small curves have points."""


def shoot(browser: Browser, run: DemoRun, out: Path) -> None:
    """Each view: in the light theme, in the dark one, or on a phone."""
    light, dark = signed_in(browser, run, WIDE), signed_in(browser, run, WIDE, dark=True)
    phone = signed_in(browser, run, PHONE)
    light.wait_for_timeout(LOOKS_MS)
    save(light, out / "now-light.png", whole=True)
    save(phone, out / "now-phone.png")
    show(dark, "#/policies", "table")
    save(dark, out / "policies-dark.png", whole=True)
    show(light, "#/sessions?verdict=trained", ".answer")
    light.get_by_text("Search", exact=False).first.click()
    light.wait_for_timeout(GISTS_MS)
    save(light, out / "sessions-light.png")
    session, other = mixed_group(run)
    show(light, f"#/sessions/{session}", ".message")
    save(light, out / "session-light.png")
    show(light, f"#/sessions/{session}?colour=advantage&with={other}", ".tokens")
    light.locator(".tok").last.hover()
    tokens = light.get_by_role("region", name="Tokens", exact=True)
    save(light, out / "tokens-light.png", part=tokens)
    show(light, f"#/lineage/groups/{run.ask(f'/sessions/{session}')['group_id']}", ".advantages")
    save(light, out / "group-light.png", whole=True)
    show(dark, "#/learning?m=reward_mean,entropy,mismatch/kl_current,staleness/total_mean", ".u-over")
    dark.wait_for_timeout(GISTS_MS)
    save(dark, out / "learning-dark.png", whole=True)


def signed_in(browser: Browser, run: DemoRun, size: tuple[int, int], dark: bool = False) -> Page:
    tab = watched_tab(context_of(browser, size, dark)).tab
    tab.goto(run.url)
    tab.get_by_label("API key").fill(ADMIN_KEY)
    tab.get_by_role("button", name="Sign in").click()
    tab.get_by_role("heading", name="Fleet").wait_for()
    return tab


def show(tab: Page, place: str, drawn: str) -> None:
    go(tab, place).locator(f"main {drawn}").first.wait_for()


def mixed_group(run: DemoRun) -> tuple[str, str]:
    """Two trained sessions of one group: one with the best reward, one with the worst."""
    session = run.ask("/sessions?order=newest&verdict=trained&limit=1")["data"][0]
    members = run.ask(f"/admin/groups/{session['group_id']}")["members"]
    ordered = sorted(members, key=lambda each: float(each["reward"]))
    return ordered[-1]["session_id"], ordered[0]["session_id"]


def save(tab: Page, path: Path, whole: bool = False, part: Locator | None = None) -> None:
    """Write a picture of the tab or of a part of it, of few colours, so that it is small."""
    if part is None:
        tab.evaluate("scrollTo(0, 0)")
    taken = tab.screenshot(full_page=whole) if part is None else part.screenshot()
    picture = Image.open(BytesIO(taken))
    picture.convert("RGB").quantize(COLOURS).save(path, optimize=True)


@contextmanager
def agents(run: DemoRun) -> Iterator[None]:
    """The demo's agents play while the block runs."""
    over = threading.Event()
    with meanwhile(over, lambda: run.play(lambda _: over.is_set())):
        yield


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    out.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="weir-demo-") as folder,
        demo_run(Path(folder)) as run,
        chromium() as browser,
        agents(run),
    ):
        shoot(browser, run, out)


if __name__ == "__main__":
    main()
