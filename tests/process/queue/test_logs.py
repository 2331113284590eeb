"""What else than a service's own lines is in its log: warnings, libraries, and how it ended."""

import json
import subprocess
import sys


def test_libraries_warnings_and_the_last_exception_are_json_as_well() -> None:
    program = (
        "import logging, sys, threading, warnings\n"
        "library = logging.getLogger('library'); library.addHandler(logging.StreamHandler())\n"
        "library.propagate = False\n"
        "from rollout_queue.settings import ServiceSettings\n"
        "from rollout_queue.signals.log_start import begin_log\n"
        "class Pump(ServiceSettings):\n    section = 'pump'\n"
        "begin_log(Pump(log_format='json'))\n"
        "library.warning('a library speaks')\n"
        "warnings.warn('a warning')\n"
        "threading.Thread(target=lambda: 1 / 0, name='t').start()\n"
        "raise RuntimeError('the end')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "default", "-c", program], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    found = {each["logger"]: each for each in map(json.loads, ended.stderr.splitlines())}
    assert found["library"]["message"] == "a library speaks"
    assert "a warning" in found["py.warnings"]["message"]
    assert "ZeroDivisionError" in ended.stderr
    assert "the end" in found["weir"]["exception"]
