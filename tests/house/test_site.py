"""The site: its navigation has every page, and its checks find what they look for."""

import subprocess
from pathlib import Path

import pytest
import yaml

from docs.site.build import FROM_CDN, LANGUAGES, LOADED, NOT_SHOWN, SHOWN, languages
from docs.site.reference import PAGES

ROOT = Path(__file__).parents[2]


def test_the_navigation_has_every_page_once() -> None:
    text = (ROOT / "docs/site/mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load("nav:" + text.partition("\nnav:")[2])["nav"]
    named = [page for entry in nav for value in entry.values() for page in pages_in(value)]
    listed = subprocess.run(
        ["git", "ls-files", *SHOWN], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    written = {name for name in listed if name.endswith(".md") and not name.startswith(NOT_SHOWN)}
    assert len(named) == len(set(named))
    assert set(named) == written | {f"reference/{name}.md" for name in PAGES}


def pages_in(value: str | list[dict[str, str]]) -> list[str]:
    """The pages of an entry of the navigation."""
    return [value] if isinstance(value, str) else [page for each in value for page in each.values()]


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"], ids=lambda page: page.name
)
def test_every_code_block_has_a_known_language(page: Path) -> None:
    assert set(languages(page.read_text(encoding="utf-8"))) <= LANGUAGES


def test_the_checks_find_a_missing_language_and_a_foreign_host() -> None:
    assert languages("a\n\n```\nb\n```\n\n```python\nc\n```\n") == ["", "python"]
    for loads in ("<script src=https://h/a.js>", '<link rel="x" href="//h/a.css">', "url(https://h/a.woff)"):
        assert LOADED.search(loads)
    assert FROM_CDN.search('"https://unpkg.com/mermaid@11/m.js"')
    assert not LOADED.search('<a href="https://h/page">')
