"""Jobs by OpenAI's client are played, graded, rewarded and evaluated, as docs/fine_tuning.md says."""

import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.fine_tuning import FineTuningJob

from environments.results import write_document
from fine_tuning.job_trainer import due_evaluation, end_evaluation, unfinished_evaluations
from fine_tuning.jobs import JobStore
from fine_tuning.served_versions import PolicyWatch
from fine_tuning.settings import FineTuningLimits
from rollout_queue.protocol.gateway_messages import PolicyVersion
from tests.support.environments.running import RunTest
from tests.support.fine_tuning.left_jobs import left_queued
from tests.support.fine_tuning.running import RunningJobs, fine_tuning, jsonl, sums
from tests.support.reward_service.graders import CHECK
from tests.support.waiting import wait_until

PAGE = (Path(__file__).parents[3] / "docs" / "fine_tuning.md").read_text(encoding="utf-8")


def double(prompt: str) -> str:
    return str(2 * int(re.findall(r"double of (\d+)", prompt)[-1]))


class Shut:
    """Answers nothing until it is opened."""

    def __init__(self) -> None:
        self.asked, self.opened = threading.Event(), threading.Event()

    def answer(self, prompt: str) -> str:
        self.asked.set()
        self.opened.wait(300)
        return double(prompt)


def assert_failed(job: FineTuningJob, code: str, message: str) -> None:
    assert job.error is not None
    assert (job.status, job.error.code) == ("failed", code)
    assert message in job.error.message
    assert job.fine_tuned_model is None


def test_each_row_is_played_graded_and_rewarded(running: RunTest, service: RunningJobs) -> None:
    running.engine.answer = lambda prompt: "6"
    made = service.start(sums(4), n_epochs=2, body={"metadata": {"owner": "me"}, "seed": 7})
    assert (made.object, made.status, made.model, made.seed) == ("fine_tuning.job", "queued", "policy", 7)
    assert made.method is not None
    assert made.method.type == "reinforcement"
    job = service.ended(made.id)
    assert (job.status, job.error, job.metadata) == ("succeeded", None, {"owner": "me"})
    assert re.fullmatch(r"policy@\d+", job.fine_tuned_model or "")
    assert job.finished_at is not None
    sessions = running.sessions()
    assert len(sessions) == 4 * 2 * 2
    rewards = Counter((each["task_id"].rpartition(":")[2], each["reward"]) for each in sessions)
    assert rewards == {("0", 0.0): 4, ("1", 0.0): 4, ("2", 0.0): 4, ("3", 1.0): 4}
    assert {each["status"] for each in sessions} == {"completed"}
    told = service.messages(job.id)
    assert told[0] == f"Created fine-tuning job: {job.id}"
    assert told[1].startswith("Fine-tuning job started")
    assert told[-1].startswith("The job has successfully completed")


def test_the_compute_multiplier_multiplies_the_answers_to_a_row(
    running: RunTest, service: RunningJobs
) -> None:
    running.engine.answer = double
    service.ended(service.start(sums(2), compute_multiplier=2.0).id)
    assert Counter(each["task_id"][-1] for each in running.sessions()) == {"0": 4, "1": 4}


def test_the_grader_reads_the_row_the_answer_and_its_json(running: RunTest, service: RunningJobs) -> None:
    running.engine.answer = lambda prompt: '{"sum": 4}'
    grader = {**CHECK, "input": "{{sample.output_json.sum}}"}
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    format_ = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema, "strict": True}}
    method = {"type": "reinforcement", "reinforcement": {"grader": grader, "response_format": format_}}
    service.ended(service.start(sums(3), body={"method": method}).id)
    assert Counter(each["reward"] for each in running.sessions()) == {0.0: 4, 1.0: 2}
    assert all("json_schema" in each["sampling_params"]["structural_tag"] for each in running.engine.requests)


def test_a_grader_that_fails_never_gives_a_reward_and_ends_the_job(
    running: RunTest, service: RunningJobs
) -> None:
    grader = {**CHECK, "reference": "{{item.no_such_field}}"}
    job = service.ended(service.start(sums(8), grader).id)
    assert_failed(job, "episodes_failed", "invalid_variable_error")
    assert {each["reward"] for each in running.sessions()} == {None}
    codes = Counter(each["verdict"]["code"] for each in running.sessions())
    assert codes["waiting_reward"] == codes["ready"] == 0


def test_a_job_whose_answers_are_all_late_fails(running: RunTest, tmp_path: Path) -> None:
    shut = Shut()
    running.engine.answer = shut.answer
    with fine_tuning(tmp_path / "late", running.url, answer_s=0.05) as service:
        job = service.ended(service.start(sums(6)).id)
        shut.opened.set()
    assert_failed(job, "episodes_failed", "no answer with a grade within 0.05 s")
    assert {each["reward"] for each in running.sessions()} == {None}


def test_a_job_whose_rows_do_not_fit_into_the_context_fails(running: RunTest, service: RunningJobs) -> None:
    rows = [{**row, "messages": [{"role": "user", "content": "x " * 40_000}]} for row in sums(6)]
    job = service.ended(service.start(rows).id)
    assert_failed(job, "episodes_failed", "does not fit into the model's context")


def test_a_job_whose_versions_cannot_be_followed_fails_at_once_and_says_why(
    running: RunTest, service: RunningJobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [RuntimeError("a version of the future")]

    async def published_after(watch: PolicyWatch, version: int) -> list[PolicyVersion]:
        if faults:
            raise faults.pop()
        return []

    shut = Shut()
    running.engine.answer = shut.answer
    monkeypatch.setattr(PolicyWatch, "published_after", published_after)
    job = service.ended(service.start(sums(2)).id)
    shut.opened.set()
    assert_failed(job, "internal_error", "RuntimeError: a version of the future")
    assert f"job {job.id} failed" in caplog.text
    assert {each["status"] for each in running.sessions()} == {"abandoned"}


def test_one_job_trains_at_a_time_and_the_others_are_queued(running: RunTest, service: RunningJobs) -> None:
    shut = Shut()
    running.engine.answer = shut.answer
    first, second = service.start(sums(2)), service.start(sums(3))
    assert shut.asked.wait(300)
    assert (service.job(first.id).status, service.job(second.id).status) == ("running", "queued")
    shut.opened.set()
    assert [service.ended(each.id).status for each in (first, second)] == ["succeeded", "succeeded"]
    listed = service.openai.fine_tuning.jobs.list(limit=1)
    assert [job.id for job in listed.data] == [second.id]
    assert [job.id for job in listed] == [second.id, first.id]


def test_a_cancelled_job_ends_its_sessions_and_the_next_one_begins(
    running: RunTest, service: RunningJobs
) -> None:
    shut = Shut()
    running.engine.answer = shut.answer
    first, second = service.start(sums(2)), service.start(sums(1))
    assert shut.asked.wait(300)
    assert service.openai.fine_tuning.jobs.cancel(first.id).status == "cancelled"
    shut.opened.set()
    assert service.ended(second.id).status == "succeeded"
    assert Counter(each["status"] for each in running.sessions()) == {"abandoned": 4, "completed": 2}
    with pytest.raises(openai.BadRequestError, match="the job is cancelled"):
        service.openai.fine_tuning.jobs.cancel(first.id)
    assert service.messages(first.id)[-1] == "The job was cancelled"


def test_a_paused_job_leaves_its_turn_and_goes_on_where_it_was(
    running: RunTest, service: RunningJobs
) -> None:
    shut = Shut()
    running.engine.answer = shut.answer
    job = service.start(sums(3))
    assert shut.asked.wait(300)
    assert str(service.openai.fine_tuning.jobs.pause(job.id).status) == "paused"
    with pytest.raises(openai.BadRequestError, match="the job is paused"):
        service.openai.fine_tuning.jobs.pause(job.id)
    shut.opened.set()
    other = service.start(sums(1))
    assert service.ended(other.id).status == "succeeded"
    assert str(service.job(job.id).status) == "paused"
    assert service.openai.fine_tuning.jobs.resume(job.id).status in ("queued", "running")
    assert service.ended(job.id).status == "succeeded"
    assert "The job goes on" in service.messages(job.id)
    judged = [each for each in running.sessions() if each["status"] == "completed"]
    assert len(judged) == 2 + 6


def test_a_job_in_progress_keeps_the_group_size_and_the_sampling_it_began_with(
    running: RunTest, tmp_path: Path
) -> None:
    shut = Shut()
    running.engine.answer = shut.answer
    directory = tmp_path / "jobs"
    with fine_tuning(directory, running.url, group_size=4, sampling={"max_tokens": 50}) as service:
        job = service.start(sums(2))
        assert shut.asked.wait(300)
    assert {each["state"] for each in running.sessions()} == {"finished"}, (
        "a service that is stopped ends them"
    )
    shut.opened.set()
    with fine_tuning(directory, running.url, group_size=2, sampling={"max_tokens": 60}) as service:
        assert service.ended(job.id).status == "succeeded"
        assert service.messages(job.id).count("The job goes on") == 1
    done = [each for each in running.sessions() if each["status"] == "completed"]
    assert Counter(each["task_id"].rpartition(":")[2] for each in done) == {"0": 4, "1": 4}
    assert {each["sampling_params"]["max_new_tokens"] for each in running.engine.requests} == {50}


def test_the_validation_file_is_played_at_the_end_and_never_trained(
    running: RunTest, service: RunningJobs
) -> None:
    running.engine.answer = lambda prompt: "2"
    held_out = service.upload(sums(4))
    job = service.start(sums(1), eval_samples=3, body={"validation_file": held_out})
    assert service.ended(job.id).status == "succeeded"
    events = list(service.openai.fine_tuning.jobs.list_events(job.id))
    (event,) = [each for each in events if each.type == "metrics"]
    data: Any = event.data
    assert (data["valid_reward_mean"], data["valid_answers"], data["valid_failed"]) == (0.25, 12, 0)
    codes = Counter(each["verdict"]["code"] for each in running.sessions())
    assert codes["not_for_training"] == 12


def test_each_version_that_was_served_meanwhile_is_a_checkpoint_of_the_job(
    running: RunTest, service: RunningJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = [PolicyVersion(version=number, step=10 * number, created_at=1000.5) for number in (1, 2, 3)]
    served = 0

    async def published_after(watch: PolicyWatch, version: int) -> list[PolicyVersion]:
        return [each for each in versions if version < each.version <= served]

    async def serving(watch: PolicyWatch) -> int:
        return served

    monkeypatch.setattr(PolicyWatch, "published_after", published_after)
    monkeypatch.setattr(PolicyWatch, "serving", serving)
    shut = Shut()
    running.engine.answer = shut.answer
    made = service.start(sums(2))
    assert shut.asked.wait(300)
    checkpoints = service.openai.fine_tuning.jobs.checkpoints
    served = 1
    wait_until(lambda: [*checkpoints.list(made.id)])
    served = 3
    shut.opened.set()
    job = service.ended(made.id)
    assert (job.status, job.fine_tuned_model) == ("succeeded", "policy@3")
    listed = [*checkpoints.list(job.id, limit=2)]
    assert [each.fine_tuned_model_checkpoint for each in listed] == ["policy@3", "policy@2", "policy@1"]
    assert [(each.step_number, each.created_at) for each in listed] == [(30, 1000), (20, 1000), (10, 1000)]
    told = [each for each in service.messages(job.id) if each.startswith("Step ")]
    assert [each.partition(",")[0] for each in told] == [
        f"Step {each.step}: version {each.version}" for each in versions
    ]


def test_lists_are_paged_by_the_last_id(running: RunTest, service: RunningJobs) -> None:
    running.engine.answer = double
    job = service.start(sums(1), body={"metadata": {"owner": "me"}})
    service.ended(job.id)
    jobs = service.openai.fine_tuning.jobs
    newest = jobs.list_events(job.id, limit=1)
    assert newest.has_more
    assert len(newest.data) == 1
    whole = [event.id for event in jobs.list_events(job.id, limit=1)]
    assert whole == [event.id for event in jobs.list_events(job.id, limit=100)]
    assert len(whole) >= 3
    assert list(jobs.checkpoints.list(job.id)) == []
    assert [each.id for each in jobs.list(metadata={"owner": "me"})] == [job.id]
    assert list(jobs.list(metadata={"owner": "you"})) == []
    with pytest.raises(openai.BadRequestError) as refused:
        jobs.list_events(job.id, after="no-such-event")
    assert refused.value.param == "after"
    with pytest.raises(openai.NotFoundError):
        jobs.retrieve("ftjob-none")


def test_the_oldest_job_that_has_ended_makes_room(running: RunTest, tmp_path: Path) -> None:
    running.engine.answer = double
    with fine_tuning(tmp_path / "few", running.url, limits={"jobs": 2}) as service:
        made = [service.ended(service.start(sums(1)).id).id for _ in range(3)]
        assert [job.id for job in service.openai.fine_tuning.jobs.list()] == made[:0:-1]
        shut = Shut()
        running.engine.answer = shut.answer
        for _ in range(2):
            service.start(sums(1))
        with pytest.raises(openai.RateLimitError, match="2 jobs wait or run"):
            service.start(sums(1))
        shut.opened.set()


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


def test_the_example_runs(running: RunTest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running.engine.answer = lambda prompt: "4"
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    with fine_tuning(tmp_path / "jobs", running.url, "admin-key") as service:
        code = code.replace("http://127.0.0.1:8400", service.url).replace("ADMIN-KEY", "admin-key")
        exec(compile(code, "docs/fine_tuning.md", "exec"), {})  # noqa: S102 - the page's own example
    told = capsys.readouterr().out
    assert "The job has successfully completed: policy@" in told
    assert len(running.sessions()) == 8 * 2 * 2


def test_every_metric_is_explained(running: RunTest, tmp_path: Path) -> None:
    with fine_tuning(tmp_path / "jobs", running.url) as service:
        metrics = re.findall(r"^# TYPE (\S+)", httpx.get(f"{service.url}/metrics", timeout=120).text, re.M)
    assert len(metrics) == 2
    assert not [name for name in metrics if f"`{name}`" not in PAGE]
