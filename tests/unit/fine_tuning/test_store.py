"""What is stored of jobs: it survives a kill in the middle of a line, and is bounded."""

from pathlib import Path

import pytest

from fine_tuning.jobs import FineTuningJob, JobEvent, JobStore
from fine_tuning.settings import FineTuningLimits
from fine_tuning.training_files import FileStore


def job(number: int = 1) -> FineTuningJob:
    return FineTuningJob(
        id=f"ftjob-{number}", number=number, created_at=0, request={}, model="policy", seed=0
    )


def test_the_newest_events_of_a_job_are_kept(tmp_path: Path) -> None:
    store = JobStore(tmp_path, FineTuningLimits(events=16))
    made = store.put(job())
    for number in range(100):
        store.tell(made, JobEvent.of(str(number)))
    assert [event.message for event in store.events(made)] == [str(number) for number in range(99, 83, -1)]
    assert len((tmp_path / made.id / "events.jsonl").read_bytes().splitlines()) <= 33


def test_a_line_that_a_kill_cut_is_left_out_and_the_next_one_is_whole(tmp_path: Path) -> None:
    store = JobStore(tmp_path, FineTuningLimits())
    made = store.put(job())
    store.tell(made, JobEvent.of("first"))
    with (tmp_path / made.id / "events.jsonl").open("ab") as file:
        file.write(b'{"id": "ftevent')
    following = JobStore(tmp_path, FineTuningLimits())
    following.tell(made, JobEvent.of("second"))
    assert [event.message for event in following.events(made)] == ["second", "first"]


def test_jobs_come_back_in_their_order_and_half_made_ones_do_not(tmp_path: Path) -> None:
    store = JobStore(tmp_path, FineTuningLimits())
    for number in (10, 9, 2):
        store.put(job(number))
    (tmp_path / "ftjob-half").mkdir()
    following = JobStore(tmp_path, FineTuningLimits())
    assert [each.number for each in following.oldest_first] == [2, 9, 10]
    assert following.next_number == 11
    assert not (tmp_path / "ftjob-half").exists()


def test_what_cannot_be_read_is_named_and_the_rest_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = JobStore(tmp_path, FineTuningLimits())
    store.put(job(1))
    store.put(job(2))
    (tmp_path / "ftjob-1" / "job.json").write_bytes(b"")
    (tmp_path / "stray").write_bytes(b"x")
    following = JobStore(tmp_path, FineTuningLimits())
    assert [each.number for each in following.oldest_first] == [2]
    assert "ftjob-1/job.json is no job, and is left alone" in caplog.text
    assert (tmp_path / "ftjob-1" / "job.json").exists()
    assert (tmp_path / "stray").exists()


def test_a_file_whose_description_cannot_be_read_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(tmp_path, FineTuningLimits())
    broken, whole = (store.add("rows", "fine-tune", b"x") for _ in range(2))
    (tmp_path / f"{broken.id}.json").write_bytes(b"")
    following = FileStore(tmp_path, FineTuningLimits())
    assert [each.id for each in following.newest_first] == [whole.id]
    assert store.path(broken).exists()
    assert "describes no file, and is left alone" in caplog.text
