"""The lease of a trainer whose process has died."""

import os
import signal
import subprocess
import sys

from redis import Redis

from rollout_queue.redis.lease.lease import Lease
from tests.support.waiting import wait_until


def test_the_lease_of_a_process_that_died_here_is_free_at_once(redis: Redis) -> None:
    claim = (
        "import sys; from redis import Redis; from rollout_queue.redis.lease.lease import Lease\n"
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
