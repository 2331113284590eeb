"""Tries mutants: one process imports and collects the tests once, and forks a child for each mutant.

    pytest collects ──► for each mutant: fork ──► child: put the mutant in, run tests until the first failure
                              ▲                                      │ a line for each test, through a pipe
                              └──────────── Outcome ◄────────────────┘

pytest calls the functions of `MutantServer` as those of a plugin. A test that fails has to pass without the
mutant, else its failure says nothing.
"""

import contextlib
import functools
import gc
import json
import os
import resource
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.mutants.mutant import Found
from tests.mutants.results import Outcome
from tests.mutants.swapping import CannotSwap, LoadedFunctions

SILENT_S = 120
"""A child in which no test ends for so long hangs, also on a machine with other work."""
CPU_S = 120
"""More CPU time than the chosen tests take together, with their fixtures."""


class MutantServer:
    """Tries the mutants that it is given, in the process that has collected the tests."""

    def __init__(
        self,
        root: Path,
        mutants: Sequence[tuple[int, Found, list[str]]],
        report: Callable[[int, Outcome], None],
        log: Path = Path(os.devnull),
    ) -> None:
        self._root, self._mutants, self._report, self._log = root, mutants, report, log
        self._sound: set[str] = set()
        """Tests that have passed here, so that a failure is the mutant's."""
        self._unsound: set[str] = set()
        self._pipe: int | None = None
        """In a child, where it writes the end of each test."""
        self._items: dict[str, pytest.Item] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Hypothesis draws the same examples each time, and does not look for a smaller one that fails."""
        import hypothesis  # pytest has to see this import

        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        current = hypothesis.settings.get_profile(hypothesis.settings.get_current_profile_name())
        hypothesis.settings.register_profile(
            "mutants", current, phases=phases, derandomize=True, database=None
        )
        hypothesis.settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """In the first process, try every mutant. In a child, return None: then pytest runs the items."""
        self._items = {item.nodeid: item for item in session.items}
        loaded = LoadedFunctions(self._root, {found.module for _, found, _ in self._mutants})
        gc.collect()
        gc.freeze()  # children then share this memory, and collect only their own garbage
        directory = tempfile.mkdtemp(prefix="mutants-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
        # As for workers of xdist, files that all tests share are then made once, beside those of each child.
        os.environ.update(PYTEST_DEBUG_TEMPROOT=directory, PYTEST_XDIST_WORKER="gw0")
        for number, found, tests in self._mutants:
            outcome = self._try(session, functools.partial(loaded.swap, found), tests)
            if outcome is None:
                return None
            self._report(number, outcome)
            for left in Path(directory).glob("pytest-of-*/pytest-*"):
                shutil.rmtree(left, ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)
        return True

    def _try(self, session: pytest.Session, swap: Callable[[], None], tests: list[str]) -> Outcome | None:
        started_s = _children_cpu_s()
        while True:
            chosen = [test for test in tests if test in self._items and test not in self._unsound]
            if not chosen:
                return Outcome("not covered")
            ended = self._fork(session, swap, chosen)
            if ended is None:
                return None
            status, by, passed = ended
            if status == "found" and by and by not in self._sound:
                control = self._fork(session, lambda: None, [by])
                if control is None:
                    return None
                if control[0] != "survived":
                    self._unsound.add(by)
                    continue
                self._sound.add(by)
            self._sound.update(passed)
            count = len(passed) + (status != "survived")
            return Outcome(status, by, count, round(_children_cpu_s() - started_s, 2))

    def _fork(
        self, session: pytest.Session, swap: Callable[[], None], tests: list[str]
    ) -> tuple[str, str, list[str]] | None:
        """The child's status, the test that ended it, and the tests that passed. In the child: None."""
        reading, writing = os.pipe()
        child = os.fork()
        if child:
            os.close(writing)
            return _listen(child, reading, tests)
        os.close(reading)
        self._pipe = writing
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 10))
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        try:
            swap()
        except CannotSwap as error:
            os.write(writing, (json.dumps(["not applied", str(error)]) + "\n").encode())
            os._exit(0)
        session.config.option.maxfail = 1
        session.items[:] = [self._items[test] for test in tests]
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._pipe is not None and (report.failed or report.when == "teardown"):
            os.write(self._pipe, (json.dumps([report.outcome, report.nodeid]) + "\n").encode())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        """A child ends here, after the fixtures have ended."""
        result = yield
        if self._pipe is not None:
            os._exit(0)
        return result


def _listen(child: int, pipe: int, tests: list[str]) -> tuple[str, str, list[str]]:
    """Wait for the child's end, or end it when it hangs."""
    text, passed = b"", list[str]()
    deadline = time.monotonic() + SILENT_S
    try:
        while time.monotonic() < deadline:
            ready, _, _ = select.select([pipe], [], [], 1)
            if not ready:
                continue
            new = os.read(pipe, 65536)
            if not new:
                break
            deadline = time.monotonic() + SILENT_S
            text += new
            *lines, text = text.split(b"\n")
            for line in lines:
                status, test = json.loads(line)
                if status == "not applied":
                    return status, test, passed
                if status == "failed":
                    return "found", test, passed
                passed.append(test)
    finally:
        os.close(pipe)
        _kill(child)
        os.waitpid(child, 0)
    if len(passed) == len(tests):
        return "survived", "", passed
    return "timeout", tests[len(passed)], passed


def _kill(child: int) -> None:
    """Kill the child and all that it started, also what left its process group."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(child)
        for each in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _children_cpu_s() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime
