"""The curves of a run come from its JSON lines, in few points, and each line is read once."""

import json
from collections.abc import Mapping
from math import nan
from pathlib import Path

import pytest

from trainer_service.curves import Curves, KeptRuns, Series, limits_of
from trainer_service.settings import GuardSettings
from trainer_service.sinks import JsonLines


def write(path: Path, *lines: Mapping[str, float]) -> None:
    sink = JsonLines(path)
    for line in lines:
        sink.write("step", {"version": line["step"], **line})


def test_each_bucket_has_the_least_the_mean_and_the_most(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *({"step": n, "reward_mean": float(n % 10)} for n in range(1, 101)))
    reply = Curves(path).read(["reward_mean"], None, None, 10)
    assert (reply.first, reply.last, reply.bucket_steps, reply.complete) == (1, 100, 10, True)
    assert reply.series["reward_mean"] == Series(list(range(1, 101, 10)), [0.0] * 10, [4.5] * 10, [9.0] * 10)
    assert reply.metrics == ["reward_mean", "step", "version"]
    part = Curves(path).read(["reward_mean"], 20, 24, 1000)
    assert part.series["reward_mean"].steps == [20, 21, 22, 23, 24]
    assert part.bucket_steps == 1


def test_the_last_line_of_a_repeated_step_counts_and_no_number_is_left_out(tmp_path: Path) -> None:
    path, curves = tmp_path / "metrics.jsonl", Curves(tmp_path / "metrics.jsonl")
    write(path, {"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 3.0})
    assert curves.read(["loss"], None, None, 9).series["loss"].mean == [1.0, 2.0, 3.0]
    write(path, {"step": 2, "loss": 5.0}, {"step": 3, "loss": nan}, {"step": 4, "grad_norm": 1.0})
    reply = curves.read(["loss", "grad_norm", "none"], None, None, 9)
    assert (reply.series["loss"].steps, reply.series["loss"].mean) == ([1, 2], [1.0, 5.0])
    assert (reply.series["grad_norm"].steps, reply.series["none"].steps) == ([4], [])
    assert (reply.first, reply.last) == (1, 4)


def test_half_a_line_and_another_file_do_no_harm(tmp_path: Path) -> None:
    path, curves = tmp_path / "metrics.jsonl", Curves(tmp_path / "metrics.jsonl")
    assert curves.read(["loss"], None, None, 9).series["loss"].steps == []
    path.write_text('{"step": 1, "version": 1, "loss": 1}\n{"st\n{"step": 2, "ver', encoding="utf-8")
    assert curves.read(["loss"], None, None, 9).series["loss"].steps == [1]
    with path.open("a", encoding="utf-8") as file:
        file.write('sion": 2, "loss": 3}\n')
    assert curves.read(["loss"], None, None, 9).series["loss"].mean == [1.0, 3.0]
    path.write_text('{"step": 7, "version": 7, "loss": 7}\n', encoding="utf-8")
    assert curves.read(["loss"], None, None, 9).series["loss"].steps == [7]


def test_a_long_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    line = json.dumps({"step": 0, "version": 0, "loss": 0.5})
    path.write_text("".join(f"{line.replace('0,', f'{n},')}\n" for n in range(1000)), encoding="utf-8")
    monkeypatch.setattr("trainer_service.curves.BLOCK_BYTES", 4096)
    monkeypatch.setattr("trainer_service.curves.PART_BYTES", 20_000)
    curves = Curves(path)
    replies = [curves.read(["loss"], None, None, 1000)]
    while not replies[-1].complete:
        replies.append(curves.read(["loss"], None, None, 1000))
    lasts = [reply.last for reply in replies]
    assert lasts == sorted(set(lasts))  # type: ignore[type-var]
    assert (len(replies) > 1, lasts[-1]) == (True, 999)
    assert len(replies[-1].series["loss"].steps) == 1000


def test_columns_that_are_not_used_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *({"step": n, "loss": 1.0, "entropy": 2.0} for n in range(10)))
    monkeypatch.setattr("trainer_service.curves.MOST_POINTS", 25)
    curves = Curves(path)
    for name in ("loss", "entropy", "loss"):
        assert len(curves.read([name], None, None, 1000).series[name].steps) == 10


def test_the_limits_are_those_of_the_guards_that_are_on() -> None:
    limits = {limit.metric: limit for limit in limits_of(GuardSettings(max_kl=0.1, reward_drop=None))}
    assert (limits["mismatch/kl_current"].least, limits["mismatch/kl_current"].most) == (-0.1, 0.1)
    assert limits["mismatch/abs_logp_current"].most == 0.2
    assert limits["grad_norm"].most is None
    assert "100 times its median" in limits["grad_norm"].says
    assert "reward_mean" not in limits


def test_tasks_and_restarts_of_a_run_are_told(tmp_path: Path) -> None:
    path, curves = tmp_path / "metrics.jsonl", Curves(tmp_path / "metrics.jsonl")
    tasks = [{"reward/task/a": 1.0}, {"reward/task/b": 0.5}, {}, {"reward/task/a": 0.25}]
    uptimes = [5.0, 6.0, 2.0, 3.0]
    for at, (task, uptime) in enumerate(zip(tasks, uptimes, strict=True), 1):
        write(path, {"step": at, "seconds/uptime": uptime, **task})
        reply = curves.read(["reward/task/a"], None, None, 9)
    assert (reply.tasks, reply.restarts) == (["reward/task/b", "reward/task/a"], [2])
    assert (reply.series["reward/task/a"].steps, reply.series["reward/task/a"].mean) == ([1, 4], [1.0, 0.25])
    # After a crash, steps are repeated: the first of them counts as the restart.
    write(path, {"step": 3, "seconds/uptime": 1.0}, {"step": 4, "seconds/uptime": 2.0})
    assert curves.read([], None, None, 9).restarts == [2]
    write(path, *({"step": 4 + n, f"reward/task/t{n}": 1.0} for n in range(1, 200)))
    assert curves.read([], None, None, 9).tasks == [f"reward/task/t{n}" for n in range(136, 200)]


def test_runs_that_are_kept_beside_this_one_are_found_by_name(tmp_path: Path) -> None:
    own, outside = tmp_path / "run" / "metrics.jsonl", tmp_path / "outside.jsonl"
    for path in (own, own.parent / "before.jsonl", own.parent / "demo" / "metrics.jsonl", outside):
        write(path, {"step": 1, "loss": 1.0})
    write(own.parent / "demo" / "deeper" / "metrics.jsonl", {"step": 1})
    (own.parent / "no run.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    (own.parent / "link.jsonl").symlink_to(outside)
    JsonLines(own).write("evaluation", {"step": 1, "version": 1})
    runs = KeptRuns(own)
    assert {each.name for each in runs.listed()} == {"before.jsonl", "demo/metrics.jsonl"}
    found = runs.curves("demo/metrics.jsonl")
    assert found is not None
    assert found.read(["loss"], None, None, 9).series["loss"].mean == [1.0]
    assert runs.curves("demo/metrics.jsonl") is found, "its points are kept"
    for bad in ("../outside.jsonl", "link.jsonl", "metrics.jsonl", "", str(outside), "metrics.eval.jsonl"):
        assert runs.curves(bad) is None, bad
    assert (KeptRuns(None).listed(), KeptRuns(tmp_path / "none" / "m.jsonl").listed()) == ([], [])
