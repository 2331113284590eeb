"""What only a whole process shows: a lease whose holder died, a log to its end, and what is imported."""

import json
import os
import signal
import subprocess
import sys

from redis import Redis

from rollout_queue.redis.lease import Lease
from tests.support.serving import free_port
from tests.support.waiting import wait_until


def test_the_lease_of_a_process_that_died_here_is_free_at_once(redis: Redis) -> None:
    claim = (
        "import sys; from redis import Redis; from rollout_queue.redis.lease import Lease\n"
        "assert Lease(Redis.from_url(sys.argv[1]), 30.0).claim() is None\n"
        "print('claimed', flush=True); sys.stdin.read()"
    )
    url = "redis://{host}:{port}/{db}".format(**redis.get_connection_kwargs())
    command = [sys.executable, "-c", claim, url]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        held = Lease(redis, 30.0).claim()
        assert held is not None
        assert held.holder.pid == other.pid
        other.send_signal(signal.SIGKILL)
        wait_until(lambda: held.holder.dead)  # also before its parent has waited for it
        assert Lease(redis, 30.0).claim() is None


def test_libraries_warnings_and_the_last_exception_are_json_as_well() -> None:
    program = (
        "import logging, sys, threading, warnings\n"
        "library = logging.getLogger('library'); library.addHandler(logging.StreamHandler())\n"
        "library.propagate = False\n"
        "from rollout_queue.settings import ServiceSettings\n"
        "from rollout_queue.starting import begin_log\n"
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
    said = [json.loads(line) for line in ended.stderr.splitlines()]  # the thread may end before or after
    found = {each["logger"]: each for each in said if each["level"] != "ERROR"}
    assert found["library"]["message"] == "a library speaks"
    assert "a warning" in found["py.warnings"]["message"]
    assert "ZeroDivisionError" in ended.stderr
    assert "the end" in found["weir"]["exception"]


def test_without_the_setting_no_tracing_of_the_sdk_is_imported() -> None:
    """redis-py imports the SDK's metrics wherever they are installed."""
    program = "import sys, gateway.__main__, rollout_server.__main__; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names = loaded.stdout.split()
    assert not [
        name for name in names if name.startswith(("opentelemetry.sdk.trace", "opentelemetry.exporter"))
    ]


ENDING = """
import os, signal, socket, sys, threading
from rollout_queue import clock
from rollout_queue.http.http_server import serve

clock.LAST_LOOK_S = 2.0  # a busy machine may take long for what follows
ADDRESS, ASK = ("127.0.0.1", int(sys.argv[1])), b"GET / HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n"
lines, sent = [], threading.Event()

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        return await send({"type": "lifespan.shutdown.complete"})
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})

async def leave():  # the loop stands still here
    lines.append(socket.create_connection(ADDRESS))
    for line in lines:
        line.sendall(ASK)
    sent.set()

def client():
    while not lines:
        try:
            lines.append(socket.create_connection(ADDRESS))
        except ConnectionRefusedError:
            pass  # it starts
    lines[0].sendall(ASK)
    lines[0].recv(4096)
    os.kill(os.getpid(), signal.SIGTERM)
    sent.wait()
    print(*(line.recv(4096)[9:12].decode() for line in lines))

threading.Thread(target=client).start()
serve(app, *ADDRESS, 60.0, leave)
"""


def test_a_server_that_ends_answers_what_came_while_it_stood_still() -> None:
    """A request on a connection that was open, and one on a new connection."""
    command = [sys.executable, "-c", ENDING, str(free_port())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.stdout.split() == ["200", "200"], done.stderr
