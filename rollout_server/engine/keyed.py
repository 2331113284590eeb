"""Runs SGLang with a key that no command line and no log shows: `python keyed.py KEY_FILE OPTION …`.

key file ──▶ --api-key, in this process alone ──▶ sglang.launch_server
log records ──▶ *** in place of the key ──▶ log

All users of the machine see command lines, and SGLang logs all of its arguments. The rollout server runs
this file by its path, with the interpreter of the engine's environment, so it imports nothing of Weir.
"""

import logging
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    key_file, *options = sys.argv[1:]
    key = Path(key_file).read_text(encoding="utf-8")
    # Modules beside this file have names that packages of the engine might import.
    sys.path[:] = [each for each in sys.path if each != str(Path(__file__).parent)]
    hide(key)
    sys.argv[1:] = [*options, f"--api-key={key}"]  # a key may begin with -
    # As with `python -m`: SGLang's child processes find its main module again.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def hide(key: str) -> None:
    """Have every log record of this process say *** in place of the key."""
    make_record = logging.getLogRecordFactory()

    def without_key(*args: Any, **more: Any) -> logging.LogRecord:
        record = make_record(*args, **more)
        try:
            said = record.getMessage()
        except Exception:  # its arguments do not fit: the handler reports that, and the caller goes on
            return record
        if key in said:
            record.msg, record.args = said.replace(key, "***"), ()
        return record

    logging.setLogRecordFactory(without_key)


if __name__ == "__main__":
    main()
