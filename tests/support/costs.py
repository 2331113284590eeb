"""What each layer of tests costs, at the end of a run: its cases, and the CPU time of its processes.

The time of a process that a test starts counts where the process is waited for. What workers import while
they collect tests is in no layer.
"""

import resource
from collections import defaultdict

import pytest

STARTED = pytest.StashKey[float]()
SPENT = "cpu_s"


def cpu_s() -> float:
    """The CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def note_start(item: pytest.Item) -> None:
    item.stash[STARTED] = cpu_s()


def note_end(item: pytest.Item, report: pytest.TestReport) -> None:
    """Call this with the report of the test's teardown, which reaches the process that prints the summary."""
    report.user_properties.append((SPENT, cpu_s() - item.stash[STARTED]))


def print_costs(reporter: pytest.TerminalReporter) -> None:
    cases, seconds = defaultdict[str, int](int), defaultdict[str, float](float)
    for report in (each for reports in reporter.stats.values() for each in reports):
        for name, value in getattr(report, "user_properties", []):
            if name == SPENT:
                layer = report.nodeid.split("/")[1]
                cases[layer] += 1
                seconds[layer] += float(str(value))
    for layer in sorted(cases):
        reporter.write_line(f"{layer:10} {cases[layer]:6} cases {seconds[layer]:8.1f} CPU s")
