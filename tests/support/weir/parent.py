"""A program that runs a stack, for tests that send it a signal:  python parent.py RUN_DIR NOTES PORT PORT"""

import os
import signal
import sys
from pathlib import Path

from weir.stack.service_process import Service, http_ready
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

run_dir, notes, *ports = sys.argv[1:]


def service(name: str, port: str) -> Service:
    script = str(Path(__file__).with_name("fake_service.py"))
    url = f"http://127.0.0.1:{port}"
    command = (sys.executable, script, name, port, notes, "-", "-")
    return Service(name, command, {int(port): f"{name}.port"}, url, http_ready(url), dict(os.environ))


with Stack(
    StackSettings(run_dir=Path(run_dir)), [service("redis", ports[0]), service("gateway", ports[1])]
) as stack:
    stack.wait_ready()
    print(*(process.pid for process in stack.processes.values()), flush=True)
    signal.pause()
