"""A Python grader runs in its own process, within its limits, and learns nothing of the service."""

import asyncio
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from reward_service.python_sandbox import PythonProcesses, PythonResult, PythonSettings, isolates
from tests.support.reward_service.running import without_namespaces
from tests.support.waiting import wait_until_async

SAMPLE = {"output_text": "42", "output_tools": []}


async def graded(source: str, item: object = None, **settings: object) -> PythonResult:
    return await PythonProcesses(PythonSettings.model_validate(settings)).grade(source, SAMPLE, item)


def exists(paths: list[str]) -> list[bool]:
    return [Path(path).exists() for path in paths]


def processes_of_graders() -> list[str]:
    """The processes that this one has started for graders."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            if f"\nPPid:\t{os.getpid()}\n" in status.read_text():
                found.append(status.with_name("cmdline").read_text())
    return [command for command in found if "child.py" in command]


def returning(expression: str) -> str:
    return f"def grade(sample, item):\n    return {expression}\n"


async def test_the_result_is_what_grade_returns() -> None:
    found = await graded(returning("1.0 if sample['output_text'] == item['answer'] else 0"), {"answer": "42"})
    assert found == PythonResult(1.0)
    assert await graded(returning("None")) == PythonResult()
    assert await graded(returning("True")) == PythonResult(1.0)
    numpy = "import numpy\n" + returning("numpy.float32(0.5)")
    assert await graded(numpy) == PythonResult(0.5)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (returning("float('nan')"), "no finite number"),
        (returning("float('inf')"), "no finite number"),
        (returning("'1'"), "no finite number"),
        (returning("[1]"), "TypeError"),
        (returning("sample['other']"), "line 2, KeyError: 'other'"),
        ("import sys\n" + returning("sys.exit(3)"), "SystemExit: 3"),
        ("def grade(:", "SyntaxError"),
        ("x = 1", "no function grade"),
        (returning("len(b'x' * 2**29)"), "MemoryError"),
    ],
)
async def test_what_the_source_does_wrong_is_its_error(source: str, error: str) -> None:
    found = await graded(source, memory_bytes=2**28)
    assert found.value is None
    assert error in (found.error or "")


@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(1000)  # longer than the limit", "timeout"),
        ("import os; os._exit(3)", "exited"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV); os.abort()", "killed"),
    ],
)
async def test_a_process_without_an_answer_is_ended(source: str, ended: str) -> None:
    found = await graded(source + "\n" + returning("1.0"), timeout_s=1 if ended == "timeout" else 30)
    assert found == PythonResult(ended=ended)


async def test_a_grader_that_used_its_cpu_time_while_the_service_stood_still_has_timed_out() -> None:
    grading = asyncio.create_task(graded("while True: pass", timeout_s=1))
    await asyncio.sleep(0.5)  # it has the source, and runs
    time.sleep(4)  # noqa: ASYNC251 - the event loop stands still, so it is the kernel that ends the process
    assert await grading == PythonResult(ended="timeout")


async def test_an_interpreter_that_does_not_start_is_no_fault_of_the_source() -> None:
    assert await graded(returning("1.0"), interpreter="/nowhere") == PythonResult(ended="not_started")


async def test_what_a_grader_prints_is_no_answer_and_may_be_long() -> None:
    source = "import sys\nprint('{\"value\": 9}' * 10**6)\nprint('x' * 10**6, file=sys.stderr)\n"
    assert await graded(source + returning("0.5")) == PythonResult(0.5)


async def test_the_process_has_none_of_the_services_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_ADMIN_KEYS", "hush")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    source = "import os, sys\n" + returning(
        "float(not [n for n in os.environ if 'WEIR' in n or 'PYTHON' in n])"
    )
    assert await graded(source) == PythonResult(1.0)
    modules = "import sys\n" + returning("float('/nowhere' in sys.path)")
    assert await graded(modules) == PythonResult(0.0)


async def test_a_grader_writes_only_small_files_in_a_directory_that_is_removed(tmp_path: Path) -> None:
    source = "import os\n" + returning("open('own', 'w').write(os.getcwd()) and float(os.getcwd() == item)")
    assert await graded(source, "/") == PythonResult(0.0)
    large = await graded(returning("open('own', 'w').write('x' * 2**20)"), file_bytes=1000)
    assert large.value is None
    here = await graded("import os\n" + returning("os.getcwd()"))
    assert exists(re.findall(r"'(/.+?weir-grader-.+?)'", here.error or "")) == [False]


async def test_what_a_grader_starts_ends_with_it(tmp_path: Path) -> None:
    """Also a process that left the group, where the system grants namespaces."""
    isolated = (await graded(returning("1.0"), isolation="required")).value == 1.0
    beating = tmp_path / "beating"
    leave = "os.setsid()" if isolated else "None"
    source = (
        "import os, time\n"
        "def grade(sample, item):\n"
        "    if os.fork() == 0:\n"
        f"        {leave}\n"
        "        while True:\n"
        f"            open({str(beating)!r}, 'w').write(str(time.time()))\n"
        "            time.sleep(0.01)  # then the next beat\n"
        f"    while not os.path.exists({str(beating)!r}):\n"
        "        time.sleep(0.01)  # until the child has begun\n"
        "    return 1.0\n"
    )
    if os.geteuid() != 0:
        assert "BlockingIOError" in ((await graded(source)).error or "")  # no process at all
        return
    assert await graded(source) == PythonResult(1.0)
    last = beating.read_text()
    await asyncio.sleep(0.5)  # a process that still ran would write fifty times
    assert beating.read_text() == last


async def test_an_isolated_grader_has_no_network() -> None:
    if (await graded(returning("1.0"), isolation="required")).ended == "no_isolation":
        pytest.skip("this system grants no namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = await graded(
            "import socket\n" + returning(f"float(bool(socket.create_connection(('127.0.0.1', {port}), 5)))")
        )
    assert "OSError" in (found.error or "") or "Error" in (found.error or "")
    assert found.value is None


async def test_a_system_without_namespaces_is_named_once_and_isolates_no_grader_of_clients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interpreter = without_namespaces(tmp_path)
    assert isolates(PythonSettings(interpreter=interpreter), "rewards") is False
    (said,) = caplog.messages
    assert said.startswith("rewards.python.isolation: the system grants no namespaces")
    with pytest.raises(SystemExit, match=r"rewards\.python\.from_clients"):
        isolates(PythonSettings(interpreter=interpreter, from_clients=True), "rewards")
    found = await graded(returning("1.0"), interpreter=interpreter, from_clients=True)
    assert found.ended == "no_isolation"
    missing = PythonSettings(interpreter=str(tmp_path / "nowhere"))
    assert isolates(missing, "rewards") is False
    granted = (await graded(returning("1.0"), isolation="required")).value == 1.0
    assert isolates(PythonSettings(), "rewards") is granted


async def test_only_so_many_processes_run_at_once(tmp_path: Path) -> None:
    source = (
        "import os, time\n"
        "def grade(sample, item):\n"
        f"    own = os.path.join({str(tmp_path)!r}, str(item))\n"
        "    open(own, 'w').close()\n"
        f"    seen = len(os.listdir({str(tmp_path)!r}))\n"
        "    time.sleep(0.05)  # the others may begin meanwhile\n"
        "    os.remove(own)\n"
        "    return float(seen)\n"
    )
    processes = PythonProcesses(PythonSettings(processes=2))
    found = await asyncio.gather(*(processes.grade(source, SAMPLE, number) for number in range(6)))
    assert max(each.value or 0 for each in found) <= 2
    assert processes.running == 0


async def test_a_cancelled_call_leaves_no_process(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    source = f"import time\nopen({str(begun)!r}, 'w')\ntime.sleep(1000)  # until it is killed\n"
    processes = PythonProcesses(PythonSettings())
    call = asyncio.create_task(processes.grade(source, SAMPLE, None))
    await wait_until_async(lambda: exists([str(begun)]) == [True])
    assert len(processes_of_graders()) == 1
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert processes_of_graders() == []
    assert processes.running == 0
