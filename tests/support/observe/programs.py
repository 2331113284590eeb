"""Prometheus and promtool, where they are installed."""

import shutil

import pytest

REASON = "Debian's package `prometheus` is not installed"
PROMTOOL = shutil.which("promtool")
PROMETHEUS = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(PROMTOOL is None or PROMETHEUS is None, reason=REASON)
