"""Which evaluation of a job is next: one that a kill has interrupted, or one that came due."""

from pathlib import Path

from environments.results.journal import write_document
from fine_tuning.jobs.store import JobStore
from fine_tuning.settings import FineTuningLimits
from fine_tuning.training.evaluations import due_evaluation, end_evaluation, unfinished_evaluations
from tests.support.environments.running import RunTest
from tests.support.fine_tuning.left_jobs import left_queued
from tests.support.fine_tuning.running import fine_tuning, jsonl, sums


def test_an_evaluation_is_due_after_so_many_versions_until_it_is_begun(tmp_path: Path) -> None:
    assert due_evaluation(tmp_path, [], 2) is None
    assert due_evaluation(tmp_path, [1], 2) is None
    assert due_evaluation(tmp_path, [1, 2], 2) == 2
    assert due_evaluation(tmp_path, [1, 2, 3], 2) == 3, "it was not begun: it is still due"
    (tmp_path / "3").mkdir()
    assert due_evaluation(tmp_path, [1, 2, 3, 4, 5], 2) == 3, "one that has not ended comes first"
    end_evaluation(tmp_path, 3)
    assert due_evaluation(tmp_path, [1, 2, 3, 4, 5], 2) == 5, "what came due meanwhile comes after it"
    end_evaluation(tmp_path, 5)
    assert due_evaluation(tmp_path, [1, 2, 3, 4, 5], 2) is None
    assert unfinished_evaluations(tmp_path) == []


def test_an_evaluation_that_was_interrupted_is_played_when_the_job_goes_on(
    running: RunTest, tmp_path: Path
) -> None:
    running.engine.answer = lambda prompt: "2"
    (job,) = left_queued(tmp_path / "left", 1, validation_file="file-2")
    place = JobStore(tmp_path / "left" / "jobs", FineTuningLimits()).path(job)
    (place / "validation.jsonl").write_bytes(jsonl(sums(4)))
    write_document(place / "evals" / "7" / "run.json", {"run": "interrupted", "settings": {}})
    with fine_tuning(tmp_path / "left", running.url) as service:
        assert service.ended(job.id).status == "succeeded"
        told = [each for each in service.messages(job.id) if each.startswith("Evaluation at version")]
    assert [each.partition(":")[0] for each in told] == ["Evaluation at version 7", "Evaluation at version 0"]
