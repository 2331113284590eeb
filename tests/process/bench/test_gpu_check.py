"""The check of a GPU runs on CPU with a tiny model, fails aloud, and refuses kindly without a GPU."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.gpu import __main__ as gpu_check
from bench.gpu import kernels
from bench.gpu.checks import at_least, at_most, peak_bytes
from bench.gpu.environment import environment
from bench.gpu.trainings import WAYS, main, trainings
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_vision_model import make_tiny_vision_model

PARTS = ["--device", "cpu", "--parts"]


@pytest.mark.parametrize(
    "parts",
    [
        {"environment": "torch", "kernels": "attention, window 100", "images": "rows with images"},
        pytest.param({"kernels": "the head of", "step": "tokens/s of the step"}, marks=pytest.mark.long),
    ],
)
def test_every_check_of_the_trainer_is_ok_on_cpu(
    parts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_check.main([*PARTS, *parts])
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith("all checks are ok")
    for found in (*parts.values(), *(("|Δlogprob| to float32",) if "images" in parts else ())):
        assert any(line.startswith("ok") and found in line for line in lines), found


def test_a_way_to_train_is_compared_with_float32_on_cpu_and_says_why_it_failed() -> None:
    exact: dict[str, float | str] = {
        f"{way}: {name}": 0.5 for way in WAYS for name in ("norm 0", "norm 1", "moved")
    }
    found = exact | {"stage 1: norm 1": 0.6, "stage 2: error": "ValueError: no", "stage 3: moved": 0.0}
    checks = dict(zip(WAYS, trainings(found, exact), strict=True))
    assert {way for way, check in checks.items() if not check.ok} == {"stage 1", "stage 2", "stage 3"}
    assert checks["stage 1"].measured == "0.2; 0.5"
    assert checks["stage 2"].measured == "ValueError: no"


@pytest.mark.parametrize("ways", [("images, adapters",), pytest.param(tuple(WAYS), marks=pytest.mark.long)])
def test_two_steps_are_made_in_each_way(
    ways: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.gpu.trainings.WAYS", {way: WAYS[way] for way in ways})
    text, sees = make_tiny_model(tmp_path / "text"), make_tiny_vision_model(tmp_path / "images")
    main([str(text), str(sees), "cpu"])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(check.ok for check in trainings(facts, facts)), facts


def test_a_failed_check_ends_with_status_1_and_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(kernels.ERRORS, torch.float32, 0.0)
    with pytest.raises(
        SystemExit, match="2 checks failed: float32: attention: largest error; float32: attention, window 100"
    ) as end:
        gpu_check.main([*PARTS, "kernels"])
    assert isinstance(end.value.code, str), "Python prints it, and exits with status 1"
    assert capsys.readouterr().out.count("FAILED  float32: attention") == 2


def test_without_a_gpu_it_says_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"torch sees no GPU here. Look at `nvidia-smi`"):
        gpu_check.main([])


def test_a_number_that_is_not_finite_is_not_ok() -> None:
    assert not at_most("error", float("nan"), 1.0).ok
    assert not at_least("rate", float("nan"), 1.0).ok
    assert at_most("error", 0.5, 1.0, " s").line() == "ok      error: 0.5 s (expected: at most 1 s)"


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 of which another process has a tenth, and on which each call takes 3000 bytes."""
    facts = SimpleNamespace(name="NVIDIA H100", total_memory=80_000_000_000, major=9, minor=0)
    for name, value in {
        "get_device_properties": facts,
        "device_count": 8,
        "mem_get_info": (72_000_000_000, 80_000_000_000),
        "synchronize": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 1000,
        "max_memory_allocated": 4000,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def test_the_environment_of_a_gpu_is_checked(fake_cuda: None) -> None:
    found = {check.what: check for check in environment(torch.device("cuda"))}
    assert found["the GPU"].measured == "NVIDIA H100, 80.0 GB, 8 of them"
    assert found["compute capability"].ok
    assert not found["memory that no other process has"].ok
    assert found["attention"].measured == "torch's attention, because flash-attn is not installed"


def test_the_memory_of_a_call_is_what_it_adds(fake_cuda: None) -> None:
    called: list[bool] = []
    assert peak_bytes(torch.device("cuda"), lambda: called.append(True)) == 3000
    assert called


def test_a_step_of_a_large_model_is_compared_with_the_gpu() -> None:
    facts = {"tokens": 65_536.0, "wall_s": 8.0, "gradient_norm": 0.5, "parameters": 8e9}
    memory = {"peak_bytes": 50e9, "counted_bytes": 60e9}
    checks = {check.what: check for check in gpu_check.step(facts | memory, "NVIDIA H100 80GB HBM3")}
    rate = checks["tokens/s of the step"]
    assert rate.expected == "at least 3.09e+03"  # 0.15 · 989e12 / (6 · 8e9)
    assert rate.ok
    assert all(check.ok for check in checks.values())
    over = {**facts, **memory, "peak_bytes": 61e9, "wall_s": 80.0}
    assert [check.ok for check in gpu_check.step(over, "NVIDIA H100")] == [True, False, False]
