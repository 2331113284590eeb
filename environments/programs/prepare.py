"""What a library needs besides its packages, done once after they are installed: `prepare.py LIBRARY`."""

import importlib
import os
import sys
from pathlib import Path


def main() -> None:
    wrapper = f"with_{sys.argv[1]}"
    if not (Path(__file__).parent / f"{wrapper}.py").exists():
        return
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    module = importlib.import_module(wrapper)
    if hasattr(module, "prepare"):
        module.prepare()


if __name__ == "__main__":
    main()
