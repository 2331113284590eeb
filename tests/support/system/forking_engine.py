#!/usr/bin/env python3
"""SGLang whose processes are forked from one that has imported everything: a start costs 13 CPU s, not 36.

SGLang spawns its scheduler and its detokenizer, and each imports torch and SGLang again. Nothing else
differs.

forking_engine.py -m sglang.launch_server ARGUMENTS     in place of the engine's Python
"""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

ENGINE_PYTHON = Path(__file__).absolute().parents[3] / ".venv-engine" / "bin" / "python"
HERE = "in-the-engines-python"


def main() -> None:
    if sys.argv[1] != HERE:
        command = [str(ENGINE_PYTHON), __file__, HERE, *sys.argv[1:]]
        os.execv(ENGINE_PYTHON, command)  # noqa: S606 - the tests' own command line
    _, _, module, *arguments = sys.argv[1:]
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang asks for "spawn"
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
