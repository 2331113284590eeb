"""Runs once in compose: writes weir.yaml, and makes the demo's model if WEIR_MODEL_DIR names no other.

WEIR_MODEL_DIR ─┬─ empty ─▶ /model/tool-…-seed0 is made once ─▶ its path and the demo's settings ─┐
                └─ named ─▶ /model is that directory ─────────▶ its path, and the defaults ───────┴▶ weir.yaml
"""

import os
from pathlib import Path

import yaml

from weir.demo.make_model import model_for
from weir.demo.settings import services_of_demo
from weir.errors import StackError
from weir.stack.services import Sections, merged, write_private

MODEL_DIR = Path("/model")
CONFIG_PATH = Path("/etc/weir/weir.yaml")
SEED = 0


def main() -> None:
    path: Path = MODEL_DIR
    settings: Sections = {}
    if not os.environ.get("WEIR_MODEL_DIR"):
        path, settings = demo()
    elif not (MODEL_DIR / "config.json").is_file():
        raise SystemExit(f"no config.json in {os.environ['WEIR_MODEL_DIR']}: WEIR_MODEL_DIR names no model")
    paths = {section: {"model_path": str(path)} for section in ("gateway", "rollout_server", "trainer")}
    write_private(CONFIG_PATH, yaml.safe_dump(merged(paths, settings), sort_keys=False))
    print(f"{CONFIG_PATH}: {path}", flush=True)


def demo() -> tuple[Path, Sections]:
    try:
        path, _ = model_for(MODEL_DIR, SEED, lambda line: print(line, flush=True))
    except StackError as error:
        raise SystemExit(str(error)) from None
    return path, services_of_demo(SEED)


if __name__ == "__main__":
    main()
