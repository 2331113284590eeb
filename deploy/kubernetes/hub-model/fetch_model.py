"""Fetches a model from the Hugging Face hub into /model/policy, once: fetch_model.py OWNER/NAME [REVISION]"""

import sys
from pathlib import Path

from huggingface_hub import snapshot_download

MODEL_DIR = Path("/model")
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
"""What Weir reads. Nothing that could be executed is fetched."""


def main(repository: str, revision: str | None = None) -> None:
    """The other pods wait for the directory, so it gets its name when all files are there."""
    out, draft = MODEL_DIR / "policy", MODEL_DIR / "fetching"
    if (out / "config.json").exists():
        print(f"{out} is there", flush=True)
        return
    snapshot_download(repository, revision=revision, local_dir=draft, allow_patterns=PATTERNS)
    if not (draft / "config.json").exists():
        raise SystemExit(f"{repository} has no config.json: it is no model that Weir can serve")
    draft.rename(out)
    print(f"{out}: {repository}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
