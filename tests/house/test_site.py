"""The site: its navigation has every page, and its checks find what they look for."""

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from docs.site.build import FROM_CDN, LANGUAGES, LOADED, languages, shown
from docs.site.reference import PAGES, settings_page
from environments.settings import RunSettings
from rollout_queue.settings import models_in
from weir.configuration import service_settings

ROOT = Path(__file__).parents[2]


def test_the_navigation_has_every_page_once_and_every_code_block_a_language() -> None:
    nav = (ROOT / "docs/site/mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    written = [name for name in shown() if name.endswith(".md")]
    assert sorted(re.findall(r"\S+\.md", nav)) == sorted(
        [*written, *(f"reference/{name}.md" for name in PAGES)]
    )
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in written}
    assert not {
        name: set(languages(text)) - LANGUAGES
        for name, text in texts.items()
        if set(languages(text)) - LANGUAGES
    }


def test_every_setting_has_a_sentence() -> None:
    rows = [row.strip("| ").split(" | ", 2) for row in settings_page() if row.startswith("| `")]
    assert len(rows) > 480
    assert not [row[0] for row in rows if len(row) != 3 or not row[2].strip()]
    shown = {name for row in rows for name in row[0].strip("`").split(".")}
    kinds: list[type[BaseModel]] = [*service_settings(), RunSettings]
    named = [name for kind in kinds for name in names_in(kind)]
    assert set(named) - shown == {"kind"}, "headings name the kinds"


CHOSEN = {"loss", "advantage", "correction", "masks", "grader"}
"""Fields of many forms, whose parameters docs/training.md and docs/rewards.md have."""


def names_in(kind: type[BaseModel]) -> Iterator[str]:
    """The names of a group's settings, at any depth."""
    for name, info in kind.model_fields.items():
        inner = [] if name in CHOSEN else list(models_in(info.annotation))
        yield from [each for group in inner for each in names_in(group)] or [name]


def test_the_checks_find_a_missing_language_and_a_foreign_host() -> None:
    assert languages("a\n\n```\nb\n```\n\n```python\nc\n```\n") == ["", "python"]
    for loads in ("<script src=https://h/a.js>", '<link rel="x" href="//h/a.css">', "url(https://h/a.woff)"):
        assert LOADED.search(loads)
    assert FROM_CDN.search('"https://unpkg.com/mermaid@11/m.js"')
    assert not LOADED.search('<a href="https://h/page">')
