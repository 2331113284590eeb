"""A fake service for the stack. It is ready once the file GATE exists, and adds NAME to NOTES on SIGTERM.

python fake_service.py NAME PORT NOTES GATE CHILD

It starts a child process and writes the child's id to the file CHILD. GATE or CHILD may be "-" for none.
"""

import http.server
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

name, port = sys.argv[1], int(sys.argv[2])
notes, gate, child = map(Path, sys.argv[3:6])


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ready = gate.name == "-" or gate.exists()
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(b"{}" if ready else b'{"error": {"message": "the gate is shut"}}')


def end(_: int, __: FrameType | None) -> None:
    with notes.open("a") as file:
        file.write(f"{name}\n")
    raise SystemExit


if child.name != "-":
    # The child gets its own session, as an engine may: a signal to our process group does not reach it.
    grandchild = subprocess.Popen(["sleep", "600"], start_new_session=True)
    child.write_text(str(grandchild.pid))
signal.signal(signal.SIGTERM, end)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
