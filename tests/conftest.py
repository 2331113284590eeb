"""Fixtures of all tests (a Redis for a worker, a tiny model, clocks), and which worker runs which tests."""

import fcntl
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import RedisError
from tokenizers import Tokenizer
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from rollout_queue import clock
from tests.support.authorities import read_one_authority
from tests.support.costs import note_end, note_start, print_costs
from tests.support.hypothesis_profiles import register
from tests.support.layers import processes_of_layer
from tests.support.memory_files import keep_files_in_memory
from tests.support.redis_clients import redis_at
from tests.support.redis_process import redis_executable
from tests.support.serving import free_port
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in the background of a script. Processes that tests start would ignore Ctrl-C too; a handler is not
    # inherited.
    signal.signal(signal.SIGINT, lambda *_: None)
gc.disable()  # while modules are imported: it would take a fifth of that time, and find nothing


class Loggers(dict[str, Any]):
    """pytest goes through all loggers before each phase of a test, and threads may make one meanwhile."""

    def values(self) -> Any:
        return list(super().values())


logging.root.manager.loggerDict = Loggers(logging.root.manager.loggerDict)
register()
keep_files_in_memory()
read_one_authority()

LAYERS = ("engine", "process", "service", "unit")
"""Workers begin with the slow layers, so that no worker is still busy at the end while the others idle."""
OWN_ENGINES = "tests/engine/system/test_bad_days.py"
"""A file whose tests start their own engines. All other files in tests/engine/system share one engine."""
UNTIL = "WEIR_TEST_UNTIL"
"""A variable that bounds a run: the seconds since 1970 after which no test begins."""
SHARED = ("tests/engine/system/", "tests/process/observe/", "tests/process/trainer_service/ranks/")
"""The files in each of these folders share their services."""


class FileScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """Gives a worker whole files, so that fixtures are made once. Files that share services go together."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        shared = [folder for folder in SHARED if file.startswith(folder) and file != OWN_ENGINES]
        return shared[0] if shared else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling:
    return FileScheduling(config, log)


def layer_of(item: pytest.Item) -> str:
    """The first folder below `tests`."""
    return item.path.relative_to(Path(__file__).parent).parts[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its layer, and sort them."""
    for item in items:
        if layer_of(item) in LAYERS:
            item.add_marker(layer_of(item))

    def rank(item: pytest.Item) -> int:
        layer = layer_of(item)
        return LAYERS.index(layer) if layer in LAYERS else len(LAYERS)

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """What was imported stays: later searches for garbage leave it out."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(f"no time is left ({UNTIL})")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """While the test and its fixtures run, its layer decides which processes may start, and a service of this
    process may take the log over. Afterwards the log is as before."""
    note_start(item)
    root, hooks = logging.root, (sys.excepthook, threading.excepthook)
    level, handlers = root.level, root.handlers[:]
    with processes_of_layer(layer_of(item)):
        try:
            return (yield)
        finally:
            root.setLevel(level)
            root.handlers[:] = handlers
            sys.excepthook, threading.excepthook = hooks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        note_end(item, report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    print_costs(terminalreporter)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("redis")
    port = free_port()
    command = [redis_executable(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)]
    server = subprocess.Popen([*command, "--save", ""], stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    client = redis_at(url)

    def answers() -> bool:
        try:
            return bool(client.ping())
        except RedisError:
            return False

    wait_until(answers)
    yield url
    client.close()
    server.terminate()
    server.wait()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 with tokenizer and weights, made once by the worker that needs it first."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny" / "model"
    directory.parent.mkdir(exist_ok=True)
    with (directory.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            from tests.support.tiny_model import make_tiny_model

            making = directory.with_name("making")
            shutil.rmtree(making, ignore_errors=True)
            make_tiny_model(making).rename(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    from gateway.language.tokenizer_files import tokenizer_of

    return tokenizer_of(tiny_model)


@pytest.fixture
def turned() -> Iterator[TurnedClock]:
    """The clock of the test and of what it starts. Fixtures that several tests share have the machine's."""
    turned = TurnedClock()
    with clock.using(turned):
        yield turned


@pytest.fixture
def stopped() -> Iterator[TurnedClock]:
    """As `turned`, but no time passes by itself."""
    stopped = TurnedClock(stopped=True)
    with clock.using(stopped):
        yield stopped
