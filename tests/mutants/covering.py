"""Which test runs which line, and what each test costs: measured by a run of tests, read for the mutants.

As a pytest plugin (`-p tests.mutants.covering`) it writes, for each worker, two files into the directory that
WEIR_TEST_COVER names: `coverage.WORKER`, with one context a test, and `costs.WORKER`, with one line a test.
Only this process and its threads are traced, not the processes that tests start.
"""

import json
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from coverage import Coverage, CoverageData

VARIABLE = "WEIR_TEST_COVER"
PACKAGES = (
    "gateway",
    "rollout_server",
    "trainer_service",
    "reward_service",
    "fine_tuning",
    "environments",
    "queue/rollout_queue",
    "deploy/weir",
)
"""The product, from the root of the tree."""
MODULES = "modules"
"""A file in that directory: the only modules that are traced, one a line. Without it, all are, with their
branches: then the end of each test takes a large part of a second."""


@dataclass(frozen=True)
class Cost:
    """What a test cost, with the fixtures that were made for it."""

    wall_s: float
    cpu_s: float
    cpu_of_processes_s: float

    @property
    def all_cpu_s(self) -> float:
        return self.cpu_s + self.cpu_of_processes_s


def costs(directory: Path) -> dict[str, Cost]:
    found = {}
    for path in sorted(directory.glob("costs.*")):
        for line in path.read_text(encoding="utf-8").splitlines():
            nodeid, wall, cpu, cpu_of_processes, *_ = json.loads(line)
            found[nodeid] = Cost(wall, cpu, cpu_of_processes)
    return found


class Lines:
    """The tests that run each line of a module."""

    def __init__(self, root: Path, directory: Path) -> None:
        self._root = root
        self._data = []
        for path in sorted(directory.glob("coverage.*")):
            self._data.append(CoverageData(str(path)))
            self._data[-1].read()
        self._modules: dict[str, dict[int, set[str]]] = {}

    def tests(self, module: str, first: int, last: int) -> set[str]:
        """The tests that run any of these lines. The empty text stands for the imports."""
        lines = self._of(module)
        return set().union(*(lines.get(line, set()) for line in range(first, last + 1)))

    def _of(self, module: str) -> dict[int, set[str]]:
        if module not in self._modules:
            merged: dict[int, set[str]] = {}
            for data in self._data:
                for line, contexts in data.contexts_by_lineno(str((self._root / module).resolve())).items():
                    merged.setdefault(line, set()).update(contexts)
            self._modules[module] = merged
        return self._modules[module]


class Tracing:
    """Traces the tests of this worker."""

    def __init__(self, directory: Path) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        some = directory / MODULES
        modules = some.read_text(encoding="utf-8").splitlines() if some.exists() else None
        self._coverage = Coverage(
            data_file=str(directory / "coverage"),
            data_suffix=worker,
            branch=modules is None,
            source=list(PACKAGES) if modules is None else None,
            include=modules,
            config_file=False,
        )
        self._coverage.start()
        self._costs = (directory / f"costs.{worker}").open("w", encoding="utf-8", buffering=1)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        started, (own, processes) = time.monotonic(), _cpu_s()
        try:
            return (yield)
        finally:
            own_after, processes_after = _cpu_s()
            figures = (time.monotonic() - started, own_after - own, processes_after - processes)
            self._costs.write(json.dumps([item.nodeid, *(round(each, 4) for each in figures)]) + "\n")
            self._coverage.switch_context("")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        self._costs.close()


def _cpu_s() -> tuple[float, float]:
    own, processes = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime, processes.ru_utime + processes.ru_stime


if VARIABLE in os.environ:  # before conftest.py imports the product
    _tracing = Tracing(Path(os.environ[VARIABLE]))

    def pytest_configure(config: pytest.Config) -> None:
        config.pluginmanager.register(_tracing)
