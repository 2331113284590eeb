"""Builds the site: `make site`.

pages and pictures of the repository, as they lie there ─▶ run/site/pages ─────────┐
settings, REST, commands, Python API ─▶ run/site/pages/reference ─▶ mkdocs --strict ┴▶ run/site/built, checked

MkDocs fails on a link, an anchor or a page of the navigation that is not there. This program fails on a code
block without a known language, and on a file that a browser would load from another host.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = ROOT / "run" / "site"
PAGES, BUILT = SITE / "pages", SITE / "built"
SHOWN = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "AGENTS.md",
    "docs/*",
    "queue/README.md",
    "results/*.md",
    "results/*.png",
    "examples/*",
    "LICENSE",
)
"""What the site has of the repository. In git's patterns, * also matches a slash."""
NOT_SHOWN = ("docs/site/", "docs/map.py", "results/introduction.md")
LANGUAGES = {"bash", "sh", "python", "yaml", "json", "js", "promql", "nginx", "text", "http", "toml"}
"""What code blocks are written in; text: output and drawings."""
FENCE = re.compile(r"^ *```(.*)$", re.M)
LOADED = re.compile(
    r"""(?:\bsrc|<link[^>]*\bhref)=["']?(?:https?:)?//|url\(["']?(?:https?:)?//|@import\s+["'](?:https?:)?//"""
)
"""An address of another host that a browser loads by itself: of a script, picture, style or font."""
FROM_CDN = re.compile(r"https://(?:unpkg\.com|cdn\.jsdelivr\.net|fonts\.\w+\.com)[^\"'`)]*")
"""What Material's program would load for diagrams, which the site has not."""


def shown() -> list[str]:
    """The files of the repository that the site has."""
    command = ["/usr/bin/env", "git", "ls-files", "--cached", "--others", "--exclude-standard", *SHOWN]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in listed if not name.startswith(NOT_SHOWN) and (ROOT / name).is_file()]


def stage() -> None:
    """Lay out the pages below run/site/pages."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for name in shown():
        (PAGES / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, PAGES / name)
    for name in ("site.css", "site.js"):
        shutil.copyfile(ROOT / "docs/site" / name, PAGES / name)


def languages(text: str) -> list[str]:
    """The language of each code block; empty for a block without one."""
    return FENCE.findall(text)[::2]


def unknown_languages() -> list[str]:
    """Code blocks that name no language, or one that is not in LANGUAGES."""
    return sorted(
        f"{page.relative_to(PAGES)}: a code block has the language {each!r}"
        for page in PAGES.rglob("*.md")
        for each in languages(page.read_text("utf-8"))
        if each not in LANGUAGES
    )


def loaded_from_elsewhere() -> list[str]:
    """The built files that make a browser load something from another host."""
    texts = {
        path: path.read_text("utf-8")
        for path in BUILT.rglob("*")
        if path.suffix in (".html", ".css", ".js", ".svg")
    }
    return sorted(
        f"{path.relative_to(BUILT)}: {match[0]}"
        for path, text in texts.items()
        for match in [*LOADED.finditer(text), *FROM_CDN.finditer(text)]
    )


def without_cdns() -> None:
    """Take the addresses of CDNs out of Material's program."""
    for path in BUILT.rglob("*.js"):
        text = path.read_text("utf-8")
        path.write_text(FROM_CDN.sub("", text), "utf-8")


def main() -> None:
    stage()
    subprocess.run([sys.executable, "docs/site/reference.py", PAGES / "reference"], cwd=ROOT, check=True)
    if faults := unknown_languages():
        raise SystemExit("\n".join(faults))
    subprocess.run(
        [SITE / "env/bin/mkdocs", "build", "--strict", "--clean", "-f", "docs/site/mkdocs.yml"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    without_cdns()
    if faults := loaded_from_elsewhere():
        raise SystemExit("\n".join(faults))
    built = BUILT.relative_to(ROOT)
    print(f"the site is in {built}: python3 -m http.server --directory {built}")


if __name__ == "__main__":
    main()
