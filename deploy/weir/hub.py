"""A model that is named as on the Hugging Face hub (OWNER/NAME) is downloaded once, then read from disk."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from weir.errors import StackError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "*.tiktoken"]
"""What Weir reads. Nothing that could be executed is fetched."""


def on_this_machine(path: Path, models_dir: Path, say: Callable[[str], None]) -> Path:
    """The directory of the model: `path`, or where the model of this name on the hub is now. Raises
    StackError."""
    name = str(path)
    if path.exists() or not HUB_NAME.fullmatch(name):
        return path
    out = models_dir / name.replace("/", "--")
    if not (out / "config.json").is_file():
        say(f"{name} is no directory here: downloading the model of this name from the Hugging Face hub")
        draft = out.with_name(f"{out.name}.part")
        _download(name, draft)
        if not (draft / "config.json").is_file():
            raise StackError(f"{name} on the Hugging Face hub is no model: it has no config.json")
        draft.rename(out)  # only a whole model has this name
    say(f"the model {name} is in {out}")
    return out


def _download(name: str, draft: Path) -> None:
    """Fetch the files; what an earlier attempt has fetched is not fetched again. Raises StackError."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise StackError(_by_hand(name, "huggingface_hub is not installed here")) from None
    try:
        endpoint = os.environ.get("HF_ENDPOINT")
        snapshot_download(name, local_dir=draft, allow_patterns=PATTERNS, endpoint=endpoint)
    except Exception as error:  # also those of the HTTP library that it uses, which may be another one
        why = next(filter(None, str(error).splitlines()), type(error).__name__).partition(". ")[0]
        raise StackError(_by_hand(name, why)) from error


def _by_hand(name: str, why: str) -> str:
    return (
        f"{name} is not a Hugging Face directory on this machine, and the model of this name could not be "
        f"downloaded from the hub: {why.rstrip('.')}. Where the hub can be reached, `hf download {name} "
        "--local-dir DIR` fetches it; then set WEIR_MODEL_PATH to DIR"
    )
