"""Runs `weir` in the test's own process, as its console script does."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch

from weir.__main__ import main


class Told(NamedTuple):
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def both(self) -> str:
        return f"{self.out}\n{self.err}"


def weir(*arguments: str) -> Told:
    out, err = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", ["weir", *arguments]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
            status: object = 0
        except SystemExit as ended:
            status = ended.code
    if isinstance(status, str):  # Python prints it, and exits with 1
        return Told(1, out.getvalue(), f"{err.getvalue()}{status}\n")
    return Told(int(str(status or 0)), out.getvalue(), err.getvalue())
