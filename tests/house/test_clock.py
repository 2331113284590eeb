"""Product code reads time, and waits for it, with `rollout_queue.clock` alone, so tests can turn it."""

import ast

import pytest

from tests.support.packages import PACKAGES, sources

EXCEPTIONS = {
    "environments.programs.host_processes": "it runs in a Python environment without Weir",
    "environments.programs.episode_relay": "it runs in a Python environment without Weir",
    "environments.programs.play": "it runs in a Python environment without Weir",
    "environments.programs.with_verifiers": "it runs in a Python environment without Weir",
    "environments.programs.with_verifiers_v0": "it runs in a Python environment without Weir",
    "environments.programs.tool_servers": "it runs in a Python environment without Weir",
    "rollout_queue.clock": "it is the clock",
    "rollout_queue.redis.pipelined": "an answer that is on its way from Redis takes real time: a "
    "turn of the clock would find it overdue",
    "trainer_service.publishing.process_group": "torch measures timeouts on the machine's clock, and this "
    "one stands in for a timeout that NCCL lacks",
    "weir.doctor.redis_health": "it asks for the time of Redis",
}
"""Modules that use the machine's clock, with the reason."""

FORBIDDEN = {
    *("time.time", "time.monotonic", "time.perf_counter", "time.sleep", "time.clock_gettime"),
    *("time.time_ns", "time.monotonic_ns", "time.perf_counter_ns", "time.clock_gettime_ns"),
    *("datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today"),
    *("asyncio.timeout", "asyncio.timeout_at", "asyncio.wait_for", "threading.Timer"),
}
NOW_WITHOUT = {"time.strftime": 2, "time.localtime": 1, "time.gmtime": 1, "time.ctime": 1, "time.asctime": 1}
"""Functions that read the time unless they get so many arguments."""
TIMERS = {"call_later", "call_at"}
"""Methods of event loops."""
EVENTS = {"threading.Event", "threading.Condition"}
WAITS = {"wait": 1, "wait_for": 2}
"""Their methods, with the number of arguments from which on one is a number of seconds."""


class Uses(ast.NodeVisitor):
    """Collects the places in a module that use the machine's clock."""

    def __init__(self, source: str) -> None:
        tree = ast.parse(source)
        self.found: list[str] = []
        self._names: dict[str, str] = {}
        """The module, or the function with its module, by the name that stands for it here."""
        self._events: set[str] = set()
        """Names and attributes that hold an event or a condition of the module `threading`."""
        for node in ast.walk(tree):
            self._learn(node)
        self.visit(tree)

    def _learn(self, node: ast.AST) -> None:
        match node:
            case ast.Import():
                self._names |= {each.asname or each.name: each.name for each in node.names}
            case ast.ImportFrom(module=str(module)):
                self._names |= {each.asname or each.name: f"{module}.{each.name}" for each in node.names}
            case ast.Assign():
                for target in node.targets:
                    self._learn_event(target, node.value)
            case ast.AnnAssign():
                self._learn_event(node.target, node.annotation)
            case ast.arg(annotation=ast.expr() as kind):
                self._learn_event(ast.Name(node.arg), kind)

    def _learn_event(self, target: ast.expr, value: ast.expr) -> None:
        """`value` is what is assigned, or the annotation."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for each, its_value in zip(target.elts, value.elts, strict=False):
                self._learn_event(each, its_value)
        elif {self._meaning(each) for each in ast.walk(value)} & EVENTS:
            self._events.add(_last(target))

    def _meaning(self, node: ast.AST) -> str:
        """The dotted name of an expression, by which all modules call it."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self._meaning(node.value)}.{node.attr}"
        return ""

    def visit_Name(self, node: ast.Name) -> None:
        self._judge(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._judge(node)
        self.generic_visit(node)

    def _judge(self, node: ast.Name | ast.Attribute) -> None:
        """A function counts even where it is not called, as in `default_factory=time.time`."""
        if self._meaning(node) in FORBIDDEN:
            self._find(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, given = self._meaning(node.func), len(node.args) + len(node.keywords)
        owner, method = ("", "")
        if isinstance(node.func, ast.Attribute):
            owner, method = _last(node.func.value), node.func.attr
        first = ast.unparse(node.args[0]) if node.args else ""
        if (
            (name == "asyncio.sleep" and first != "0")
            or (name == "asyncio.wait" and any(each.arg == "timeout" for each in node.keywords))
            or given < NOW_WITHOUT.get(name, 0)
            or (method == "time" and not given and not name.startswith(("time.", "clock.")))  # of a loop
            or (method in TIMERS and name != f"rollout_queue.clock.{method}")
            or (owner in self._events and given >= WAITS.get(method, given + 1))
        ):
            self._find(node)
        self.generic_visit(node)

    def _find(self, node: ast.expr) -> None:
        self.found.append(f"line {node.lineno}: {ast.unparse(node)}")


def _last(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_product_code_uses_the_clock_that_it_was_handed(package: str) -> None:
    used = {name: Uses(path.read_text(encoding="utf-8")).found for name, path in sources(package)}
    assert not [f"{name}: {found}" for name, found in used.items() if found and name not in EXCEPTIONS]


def test_each_exception_is_needed() -> None:
    places = {name: path for package in PACKAGES for name, path in sources(package)}
    assert not [name for name in EXCEPTIONS if not Uses(places[name].read_text(encoding="utf-8")).found]


@pytest.mark.parametrize(
    "line",
    [
        "import time; time.time()",
        "import time as t; t.monotonic()",
        "from time import perf_counter as now; now()",
        "import time; began = field(default_factory=time.time)",
        "import time; time.sleep(1)",
        "import time; time.strftime('%Y')",
        "from datetime import datetime, UTC; datetime.now(UTC)",
        "import datetime as d; d.datetime.utcnow()",
        "from datetime import date; date.today()",
        "import asyncio; asyncio.sleep(0.1)",
        "from asyncio import sleep; sleep(pause_s)",
        "import asyncio; asyncio.timeout(1)",
        "import asyncio; asyncio.wait_for(task, 1)",
        "import asyncio; asyncio.wait([task], timeout=1)",
        "loop.time()",
        "asyncio.get_running_loop().time()",
        "self._loop.call_later(1, stop)",
        "loop.call_at(at, stop)",
        "import threading; threading.Timer(1, stop)",
        "import threading; self._over = threading.Event(); self._over.wait(1)",
        "from threading import Event; over, count = Event(), 1; over.wait(timeout=1)",
        "import threading\ndef wait(over: threading.Event) -> None: over.wait(1)",
        "import threading; changed: threading.Condition; changed.wait_for(ready, 1)",
    ],
)
def test_the_rule_finds_the_machines_clock(line: str) -> None:
    assert Uses(line).found, line


@pytest.mark.parametrize(
    "line",
    [
        "from rollout_queue import clock; clock.now(); clock.sleep(1); clock.call_later(1, stop)",
        "import asyncio; asyncio.sleep(0)",
        "import asyncio; asyncio.wait(tasks)",
        "import asyncio; over = asyncio.Event(); over.wait()",
        "import threading; over = threading.Event(); over.wait()",
        "import time; time.strftime('%Y', time.localtime(clock.now()))",
        "process.wait(1)",
        "from datetime import datetime, UTC; datetime.fromtimestamp(1, UTC)",
    ],
)
def test_the_rule_leaves_other_things_alone(line: str) -> None:
    assert not Uses(line).found, line
