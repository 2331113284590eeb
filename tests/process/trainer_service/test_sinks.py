"""The sinks of a step's metrics, JSON lines, TensorBoard and Weights & Biases, and sinks that fail."""

import errno
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.support.serving import free_port
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.metric_files import curve, lines
from trainer_service import sinks
from trainer_service.settings import TrainerSettings, WandbSettings
from trainer_service.sinks import TensorBoard, WeightsAndBiases, chosen_sinks
from trainer_service.trainer_metrics import TrainerMetrics

Values = Mapping[str, float]


def test_a_step_is_a_line_and_a_point_of_every_curve(harness: Harness) -> None:
    harness.step("g")
    harness.step("h")
    written = lines(harness.root / "metrics.jsonl")
    assert [line["step"] for line in written] == [1, 2]
    # The second step has no token of the trainer's own version, so some metrics are of the first alone.
    for name in written[0].keys() & written[1].keys() - {"step", "time"}:
        found = curve(harness.root / "tensorboard", name)
        assert [at for at, _ in found] == [1, 2]
        assert [value for _, value in found] == pytest.approx([line[name] for line in written]), name


def test_steps_that_a_restart_makes_again_replace_those_that_were_lost(make_harness: MakeHarness) -> None:
    harness = make_harness(checkpoint_every_steps=2, publish_every_steps=2).start()
    for name in "abc":
        harness.step(name)
    again = harness.restart()  # no checkpoint has step 3; its group is trained again, after another one
    assert again.trainer.step == 2
    again.agents.group("d", [0.25, 0.75])
    assert again.trainer.run_once()
    again.step("e")
    found = curve(harness.root / "tensorboard", "version")
    assert [at for at, _ in found] == [1, 2, 3, 4]
    written = lines(harness.root / "metrics.jsonl")
    assert [line["step"] for line in written] == [1, 2, 3, 3, 4]
    last = {line["step"]: float(line["version"]) for line in written}
    assert dict(found) == last


def test_settings_say_where_tensorboard_writes_and_turn_sinks_off(
    make_harness: MakeHarness, model_path: Path, tmp_path: Path
) -> None:
    harness = make_harness(tensorboard_dir=tmp_path / "elsewhere").start()
    harness.step("g")
    assert not (harness.root / "tensorboard").exists()
    assert curve(tmp_path / "elsewhere", "reward_mean") == [(1, 0.5)]
    written = TrainerSettings(
        model_path=model_path, metrics_path=tmp_path / "metrics.jsonl", tensorboard_dir=None
    )
    assert [sink.name for sink in chosen_sinks(written)] == ["jsonl"]
    without = TrainerSettings(model_path=model_path, metrics_path=None)
    assert without.tensorboard_dir is None
    assert not chosen_sinks(without)


def test_a_point_that_the_disk_does_not_take_is_left_out_whole(tmp_path: Path) -> None:
    """The next records can be read. A partial record would hide the rest of its file."""
    registry = CollectorRegistry()
    metrics = TrainerMetrics(registry, [TensorBoard(tmp_path)])
    metrics.stepped(point(1))
    with pytest.MonkeyPatch.context() as patch:

        def full(_file: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr("tensorboardX.record_writer.os.fsync", full)
        metrics.stepped(point(2))
        metrics.stepped(point(3))
    metrics.stepped(point(4))
    metrics.close()
    assert curve(tmp_path, "reward_mean") == [(1, 1.0), (4, 4.0)]
    failures = registry.get_sample_value("weir_trainer_sink_failures_total", {"sink": "tensorboard"})
    assert failures == 2


def point(at: int) -> dict[str, float]:
    return {"step": at, "version": at, "time": 1e9, "tokens": 1, "reward_mean": float(at)}


def test_a_sink_that_fails_is_counted_and_stops_neither_the_step_nor_the_others(
    make_harness: MakeHarness,
) -> None:
    class Broken:
        name = "broken"

        def resume(self, step: int) -> None: ...

        def write(self, what: str, values: Values) -> None:
            raise RuntimeError("no network")

        def close(self) -> None: ...

    harness = make_harness(sinks=[Broken()]).start()
    harness.step("g")
    assert [line["step"] for line in lines(harness.root / "metrics.jsonl")] == [1]
    assert harness.registry.get_sample_value("weir_trainer_sink_failures_total", {"sink": "broken"}) == 1
    assert set(harness.session_codes().values()) == {"trained"}


def history(directory: Path) -> list[dict[str, float]]:
    """The metrics in the file of an offline run, whose records are in blocks as in LevelDB's log."""
    import wandb

    wandb.teardown()  # waits for wandb's process, which may write the file after the end of the run
    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    return records_in(path)


def records_in(path: Path) -> list[dict[str, float]]:
    """The metrics in one file, which ends anywhere if its process was killed."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    content, at, rows = path.read_bytes(), 7, []
    part = b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        size, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        if at + 7 + size > len(content):
            break
        part += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record.FromString(part)
            part = b""
            if items := record.history.item:
                keys = [item.key or "/".join(item.nested_key) for item in items]
                rows.append(dict(zip(keys, [json.loads(item.value_json) for item in items], strict=True)))
    return rows


def test_weights_and_biases_has_every_step_also_a_repeated_one(
    make_harness: MakeHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real package, offline."""
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    harness = make_harness(wandb={"project": "weir", "name": "n", "mode": "offline", "dir": tmp_path}).start()
    harness.step("g")
    values = lines(harness.root / "metrics.jsonl")[0]
    metrics = harness.metrics
    metrics.stepped({**values, "step": 1, "reward_mean": 0.75})
    metrics.close()
    rows = history(tmp_path)
    assert [(row["step"], row["reward_mean"]) for row in rows] == [(1, 0.5), (1, 0.75)]
    assert rows[0].keys() >= values.keys()
    assert harness.registry.get_sample_value("weir_trainer_sink_failures_total", {"sink": "wandb"}) is None


KILLED = """
import os, signal, sys
from pathlib import Path
from trainer_service.settings import WandbSettings
from trainer_service.sinks import JsonLines
from trainer_service.sinks import WeightsAndBiases

root, first, last, resumes = Path(sys.argv[1]), *map(int, sys.argv[2:])
path = root / "metrics.jsonl"
settings = WandbSettings(project="weir", name="n", mode="offline", dir=root)
sinks = [JsonLines(path), WeightsAndBiases(settings, {}, path)]
for sink in sinks:
    sink.resume(resumes)
for step in range(first, last + 1):
    names = {f"metric_{number}": float("nan") if number == 7 else step / 3 for number in range(60)}
    for sink in sinks:
        sink.write("step", {"step": step, "time": 1e9, "version": 100 * first + step, **names})
        if step % 4 == 0:
            sink.write("evaluation", {"step": step, "version": step, "eval": step})
os.killpg(0, signal.SIGKILL)
"""


def test_weights_and_biases_has_every_durable_step_after_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real package, offline: it loses what it holds in memory. Checkpoints have the steps 9 and 12."""
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    for first, last, resumes in ((1, 11, 0), (10, 14, 9), (13, 15, 12)):
        run = [sys.executable, "-c", KILLED, str(tmp_path), *map(str, (first, last, resumes))]
        assert subprocess.run(run, start_new_session=True, check=False).returncode == -signal.SIGKILL
    sink = WeightsAndBiases(
        WandbSettings(project="weir", name="n", mode="offline", dir=tmp_path), {}, tmp_path / "metrics.jsonl"
    )
    sink.resume(13)
    sink.close()
    import wandb

    wandb.teardown()
    rows = [row for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb") for row in records_in(path)]
    written = {(row["step"], row["version"]) for row in rows if "time" in row}
    durable = {(step, 100 + step) for step in range(1, 10)} | {(step, 1000 + step) for step in range(10, 13)}
    assert written >= durable | {(13, 1313)}
    assert {row["step"] for row in rows if "eval" in row} >= {4, 8, 12}


def test_weights_and_biases_that_is_away_stops_no_training(
    make_harness: MakeHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real package, with no server at the address of its service."""
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr(sinks, "AWAY_S", 1.0)
    harness = make_harness(wandb={"project": "weir", "dir": tmp_path}).start()
    harness.step("g")
    harness.metrics.close()
    assert [row["step"] for row in history(tmp_path)] == [1]


def test_a_missing_wandb_package_is_an_error_only_if_the_settings_ask_for_it(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    make_harness().start().step("g")
    with pytest.raises(SystemExit, match=r"trainer\.wandb is set, but .* pip install 'weir-rl\[wandb\]'"):
        WeightsAndBiases(WandbSettings(project="weir"), {}, None)
