"""CPU time is measured of the process and of what it started."""

import subprocess
import sys
import time

from results.cpu_clock import CpuClock

BURN = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


def test_the_cpu_time_of_children_counts_also_after_they_ended() -> None:
    with CpuClock() as clock:
        began = time.time()
        subprocess.run([sys.executable, "-c", BURN], check=True)
    ended = time.time()
    assert clock.cpu_s_at(ended) >= 0.5
    assert 0 <= clock.cpu_s_at(began) <= clock.cpu_s_at(ended)
    assert clock.seconds_at(ended) >= 0.5
