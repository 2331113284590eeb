"""The check of a GPU drives the whole loop, here on CPU: the real engine, one step, one push."""

import pytest

from bench.gpu import __main__ as gpu_check

pytestmark = pytest.mark.long


def test_the_loop_samples_trains_and_pushes(capfd: pytest.CaptureFixture[str]) -> None:
    gpu_check.main(["--device", "cpu", "--parts", "loop"])
    lines = capfd.readouterr().out.splitlines()
    for part in ("|Δlogprob| of trainer and engine", "one step", "one push: version served: 1"):
        assert any(line.startswith("ok") and part in line for line in lines), part
