"""Fetches a model from the Hugging Face hub into /model/policy, once: fetch_model.py OWNER/NAME [REVISION]

A volume keeps its model: what was recorded, trained and published belongs to it. Another model is refused.
"""

import sys
from pathlib import Path

from huggingface_hub import snapshot_download

MODEL_DIR = Path("/model")
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
"""What Weir reads. Nothing that could be executed is fetched."""
ORIGIN = "weir-origin"
"""A file in the model's directory with what was asked for."""
OTHER_MODEL = "train another model in a namespace of its own, or delete this one with its volumes first"


def main(repository: str, revision: str = "main") -> None:
    """The other pods wait for the directory, so it gets its name when all files are there."""
    asked = f"{repository}@{revision}"
    out, draft = MODEL_DIR / "policy", MODEL_DIR / f"fetching-{asked.replace('/', '--')}"
    if (out / "config.json").exists():
        there = (out / ORIGIN).read_text(encoding="utf-8") if (out / ORIGIN).exists() else asked
        if there != asked:
            raise SystemExit(f"{out} is {there}, not {asked}: {OTHER_MODEL}")
        print(f"{out} is there", flush=True)
        return
    snapshot_download(repository, revision=revision, local_dir=draft, allow_patterns=PATTERNS)
    if not (draft / "config.json").exists():
        raise SystemExit(f"{repository} has no config.json: it is no model that Weir can serve")
    (draft / ORIGIN).write_text(asked, encoding="utf-8")
    draft.rename(out)
    print(f"{out}: {asked}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
