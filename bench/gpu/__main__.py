"""Checks a machine with a GPU: environment, kernels, images, trainings, a step, and the loop with one push.

python -m bench.gpu [--device cpu] [--model DIRECTORY] [--parts PART …]

Each check is one line with what was measured and what it should be. The exit status is 1 if one failed.
Without --model, it makes a random Qwen3 of 100M weights; with --device cpu, a tiny one. The parts images and
trainings always have tiny models.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench.gpu.checks import Check, at_least, at_most
from bench.gpu.environment import environment
from bench.gpu.images import images
from bench.gpu.kernels import kernels
from bench.gpu.loop import loop
from bench.gpu.trainings import trainings
from bench.policies import make_policy
from bench.trainer import Facts, process
from bench.workloads import HUNDRED_MILLION
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_vision_model import make_tiny_vision_model
from trainer_service.settings import TrainerSettings
from trainer_service.sizing import find_gpu, resolved

PARTS = ("environment", "kernels", "images", "trainings", "step", "loop")
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "A10": 125e12}
"""Dense bfloat16 operations a second, by a part of the GPU's name (data sheets of NVIDIA)."""
USE = 0.15
"""The smallest share of them that a step of a model with `LARGE` parameters should reach."""
LARGE = 1e9
NO_GPU = (
    "torch sees no GPU here. Look at `nvidia-smi`, and at torch.version.cuda of .venv: `make install` "
    "installs the CUDA build if it finds nvidia-smi. `python -m bench.gpu --device cpu` runs the checks on a "
    "tiny model."
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(NO_GPU)
    failed = []
    with tempfile.TemporaryDirectory() as name:
        for check in checks(
            asked.device, asked.model or made(Path(name) / "model", asked.device), asked.parts
        ):
            print(check.line(), flush=True)
            failed += [] if check.ok else [check.what]
    if failed:
        raise SystemExit(f"{len(failed)} checks failed: {'; '.join(failed)}")
    print("all checks are ok; docs/gpu.md says what else to look at")


def checks(device: str, model: Path, parts: Sequence[str]) -> Iterator[Check]:
    settings = TrainerSettings.model_validate({"model_path": model, "device": device})
    gpu = find_gpu(settings)
    chosen = resolved(settings, gpu, ranks=1)
    dtype, where = getattr(torch, chosen.precision), torch.device(device)
    dtypes = tuple(dict.fromkeys([torch.float32, dtype]))
    if "environment" in parts:
        yield from environment(where)
    if "kernels" in parts:
        yield from kernels(where, dtypes, model)
    if "images" in parts or "trainings" in parts:
        with tempfile.TemporaryDirectory() as name:
            yield from tiny_models(device, dtypes, parts, Path(name))
    torch.cuda.empty_cache()  # the next parts run in other processes; without a GPU it does nothing
    if "step" in parts:
        tokens = 65_536 if gpu else 2048
        facts = process("bench.gpu.step", model, device, tokens, here=gpu is None)
        yield from step(facts, gpu.name if gpu else "")
    if "loop" in parts:
        with tempfile.TemporaryDirectory() as name:
            yield from loop(device, dtype, model, Path(name))


def tiny_models(
    device: str, dtypes: Sequence[torch.dtype], parts: Sequence[str], folder: Path
) -> Iterator[Check]:
    """The checks that need a tiny model of text, and one that reads images."""
    text, sees = make_tiny_model(folder / "text"), make_tiny_vision_model(folder / "images")
    if "images" in parts:
        yield from images(torch.device(device), dtypes, sees)
        torch.cuda.empty_cache()
    if "trainings" in parts:
        found, exact = (
            process("bench.gpu.trainings", text, sees, *ways, here=device == "cpu")
            for ways in ((device,), ("cpu", "float32"))
        )
        yield from trainings(found, exact)


def step(facts: Facts, gpu: str) -> Iterator[Check]:
    """The checks of one optimizer step, from its figures and the name of the GPU, if there is one."""
    yield at_most("a step of synthetic rows: norm of the gradient", facts["gradient_norm"], 1e3)
    rate = facts["tokens"] / facts["wall_s"]
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in gpu), None)
    if peak is not None and facts["parameters"] >= LARGE:
        yield at_least("tokens/s of the step", rate, USE * peak / (6 * facts["parameters"]))
    else:
        yield Check("tokens/s of the step", f"{rate:.0f}", "no figure for this device and model", rate > 0)
    if gpu:
        counted = facts["counted_bytes"] / 1e9
        yield at_most(
            "memory of the step, against the trainer's count", facts["peak_bytes"] / 1e9, counted, " GB"
        )


def made(path: Path, device: str) -> Path:
    if device == "cpu":
        return make_tiny_model(path)
    make_policy(path, HUNDRED_MILLION)
    return path


if __name__ == "__main__":
    main()
