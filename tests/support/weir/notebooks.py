"""Notebooks as programs."""

import json
from pathlib import Path


def code_of(notebook: Path) -> str:
    """The code of the cells, one after the other. No output is stored."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
