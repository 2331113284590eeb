"""The warm start learns its clean rows, stops with a sentence when it cannot, and leaves a whole model."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_service.warm_start import Example, by_length, main, warm_start


def make_plan(directory: Path, model_path: Path, **plan: Any) -> Path:
    """Make a plan that teaches to copy the token after 5. Its few rows are learnt in seconds."""
    directory.mkdir()
    draw = random.Random(0)
    for name in ("config.json", "tokenizer.json"):
        (directory / name).write_bytes((model_path / name).read_bytes())
    rows = []
    for index in range(64):
        padding = [3] * draw.randint(0, 6)
        rows.append({"ids": [*padding, 5, 10 + index % 8, 6, 10 + index % 8, 1]})
        rows[-1]["mask"] = [0] * (len(padding) + 3) + [1, 1]
    for name in ("clean", "habit", "probe"):
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    given = {"lr": 1e-2, "batch": 16, "warmup_steps": 5, "min_steps": 20, "habit_steps": 5, "threads": 1}
    (directory / "plan.json").write_text(json.dumps(given | plan), encoding="utf-8")
    return directory


def test_a_skill_is_learnt_and_a_whole_model_is_left(
    tmp_path: Path, model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    plan, out = make_plan(tmp_path / "plan", model_path), tmp_path / "models" / "first"
    main(["--plan", str(plan), "--out", str(out), "--seed", "3"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["probe"] >= 0.98
    assert set(result) == {"steps", "probe", "seconds"}
    names = {path.name for path in out.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert not {"plan.json", "clean.jsonl"} & names
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model(torch.tensor([[5, 12, 6]])).logits[0, -1].argmax() == 12


def test_the_same_seed_makes_the_same_model(tmp_path: Path, model_path: Path) -> None:
    plan = make_plan(tmp_path / "plan", model_path)
    for name in ("a", "b"):
        warm_start(plan, tmp_path / name, seed=1)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_a_skill_that_is_not_learnt_ends_the_run_with_a_sentence(tmp_path: Path, model_path: Path) -> None:
    plan = make_plan(tmp_path / "plan", model_path, max_steps=20, lr=1e-9)
    with pytest.raises(SystemExit, match="of the probe is exact after 20 steps"):
        warm_start(plan, tmp_path / "out", seed=1)
    assert not (tmp_path / "out").exists()


def test_by_length_keeps_every_example_once() -> None:
    examples = [Example([0] * length, [1] * length) for length in (9, 2, 5, 7, 3, 1, 8, 4, 6, 10, 11)]
    assert sorted(len(e.ids) for part in by_length(examples) for e in part) == list(range(1, 12))
