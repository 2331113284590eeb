"""Which device an engine gets: what `nvidia-smi` says decides."""

from pathlib import Path

import pytest

from rollout_server.engine.command import find_device


def test_without_a_gpu_tool_the_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_device("auto") == "cpu"
    assert find_device("cuda") == "cuda"
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: a fine one'\n")
    tool.chmod(0o755)
    assert find_device("auto") == "cuda"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert find_device("auto") == "cpu"
