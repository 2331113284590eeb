"""The same program as with the newest SDK."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[1] / "tinker_newest" / "play.py"), run_name="__main__")
