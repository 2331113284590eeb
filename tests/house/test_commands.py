"""Each command of README and the Learn pages is in `tests/commands.yaml`: who runs it, or why nobody does."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
LISTED: dict[str, str] = yaml.safe_load((ROOT / "tests/commands.yaml").read_text(encoding="utf-8"))
BLOCK = re.compile(r"^```(?:bash|sh)\n(.*?)^```", re.M | re.S)


def pages() -> list[Path]:
    nav = (ROOT / "docs/site/mkdocs.yml").read_text(encoding="utf-8").partition("- Learn:")[2]
    return [ROOT / "README.md", *(ROOT / name for name in re.findall(r"docs/\w+\.md", nav.split("- Do:")[0]))]


def commands() -> list[str]:
    """Without the options in the lines that follow, and without comments."""
    lines = [
        line
        for page in pages()
        for block in BLOCK.findall(page.read_text(encoding="utf-8"))
        for line in re.sub(r"\\\n", "", block).splitlines()
    ]
    return [re.split(r"\s+# ", line)[0].strip() for line in lines if line and not line.startswith("#")]


def test_every_command_of_the_learn_pages_is_run_or_has_a_reason() -> None:
    found = commands()
    assert len(pages()) > 8
    assert len(found) > 20
    assert not [each for each in found if not any(each.startswith(listed) for listed in LISTED)]


def test_what_runs_a_command_exists() -> None:
    runs = {each for each in LISTED.values() if not each.startswith("not run: ")}
    assert not {each for each in runs if not (ROOT / each).is_file()}
