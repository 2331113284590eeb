"""The same program as with the newest cookbook."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[1] / "cookbook_newest" / "play.py"), run_name="__main__")
