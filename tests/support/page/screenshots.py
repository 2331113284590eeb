"""Takes the screenshots of docs/page: `make page-shots`."""

import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page
from tokenizers import Tokenizer

from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.running import ADMIN_KEY, Backends
from tests.support.page.browser import PHONE, WIDE, chromium, context_of, watched_tab
from tests.support.page.deployment import ShownDeployment, shown_deployment
from tests.support.page.scene import fill, live
from tests.support.redis_process import RedisProcess
from tests.support.serving import serving
from tests.support.tiny_model import make_tiny_model

COLOURS = 96
OUT = Path(__file__).parents[3] / "docs/page"


def shoot(browser: Browser, shown: ShownDeployment, out: Path) -> None:
    """Each view in both themes, wide and on a phone."""
    for theme, size in (("light", WIDE), ("dark", WIDE), ("light", PHONE), ("dark", PHONE)):
        name = f"{theme}.png" if size == WIDE else f"{theme}-phone.png"
        context = context_of(browser, size, theme == "dark")
        tab = watched_tab(context).tab
        tab.goto(shown.gateway.url)
        tab.get_by_label("API key").fill(ADMIN_KEY)
        save(tab, out / f"sign-in-{name}")
        tab.get_by_role("button", name="Sign in").click()
        tab.get_by_role("heading", name="Fleet").wait_for()
        live(shown)
        save(tab, out / f"now-{name}", whole=size == WIDE)
        tab.get_by_role("link", name="Policies", exact=True).click()
        tab.get_by_role("heading", name="Last pushes").wait_for()
        save(tab, out / f"policies-{name}", whole=size == WIDE)
        tab.get_by_role("button", name="Roll back to version 11").click()
        tab.get_by_role("dialog").wait_for()
        save(tab, out / f"dialog-{name}")
        context.close()


def save(tab: Page, path: Path, whole: bool = False) -> None:
    """Write a picture of the tab, of few colours, so that it is small."""
    picture = Image.open(BytesIO(tab.screenshot(full_page=whole)))
    picture.convert("RGB").quantize(COLOURS).save(path, optimize=True)


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisProcess(Path(folder) / "redis").start(maxmemory="256mb")
        model = make_tiny_model(Path(folder) / "model")
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        backends = Backends(redis.url, model, tokenizer, redis.client, FakeEngine(tokenizer))
        try:
            with serving(backends) as backends.engine_url, shown_deployment(backends) as shown:
                fill(shown)
                with chromium() as browser:
                    shoot(browser, shown, out)
        finally:
            redis.kill()
    subprocess.run(["ls", "-l", str(out)], check=True)


if __name__ == "__main__":
    main()
