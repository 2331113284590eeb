"""The reward service and fine-tuning jobs on the whole system: their rewards become new versions."""

from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.fine_tuning.running import fine_tuning, sums
from tests.support.reward_service.running import reward_service
from tests.support.system.real_system import ADMIN_KEY, System
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long


def test_a_group_is_trained_on_the_rewards_of_a_rule(system: System) -> None:
    """Each member has another item, so that no reward is the mean of the group, which would train nothing."""
    source = "def grade(sample, item):\n    return item['worth'] if sample['transcript'] else 0\n"
    rule = {"name": "worth", "kind": "python", "source": source, "task_prefix": "worth-"}
    given: Any = {"gateway_url": system.stack.gateway_url, "admin_keys": [ADMIN_KEY], "rules": [rule]}
    with reward_service(**given) as rewards:
        group = {"group_id": "worth-group", "group_size": 4, "task_id": "worth-1"}
        worths = [{"metadata": {"item": {"worth": worth}}} for worth in (0.0, 0.1, 0.2, 1.0)]
        members = [system.post("/sessions", group | worth) for worth in worths]
        for member in members:
            system.say(member, "tell me", max_tokens=16)
            system.post(f"/sessions/{member['session_id']}/finish", {"status": "completed"})
        paths = [f"/sessions/{member['session_id']}" for member in members]

        def trained() -> bool:
            return all(system.get(path)["verdict"]["code"] == "trained" for path in paths)

        wait_until(trained, timeout_s=300)
        assert rewards.metric('weir_rewards_sessions_total{outcome="rewarded",rule="worth"}') == 4
    assert {system.get(path)["rewards"][0]["key"] for path in paths} == {"worth"}


def test_the_engine_takes_the_formats_of_the_judges(system: System) -> None:
    """A random model never ends its answer. That is an error of the grader, and none of the server."""
    sampling = {"max_completions_tokens": 32}
    asked = {"name": "j", "model": "policy", "input": [{"role": "user", "content": "hi"}]}
    score = {"type": "score_model", "sampling_params": sampling, **asked}
    label = {"type": "label_model", "labels": ["a", "b"], "passing_labels": ["a"], **score}
    given: Any = {"gateway_url": system.stack.gateway_url, "admin_keys": [ADMIN_KEY]}
    with reward_service(**given) as rewards:
        for grader in (score, label | {"type": "label_model"}):
            answer = rewards.run(grader, "x", ADMIN_KEY).json()
            assert answer["metadata"]["errors"]["model_grader_server_error_details"] is None
            assert answer["metadata"]["errors"]["model_grader_parse_error"] is True
            assert answer["metadata"]["token_usage"] > 32


HAS_AN_E = {
    "type": "string_check",
    "name": "has an e",
    "input": "{{sample.output_text}}",
    "reference": "e",
    "operation": "like",
}


def test_a_job_trains_the_policy_and_names_the_version_that_it_made(system: System, tmp_path: Path) -> None:
    before = system.serving()
    settings: dict[str, Any] = {"sampling": {"max_tokens": 8}, "settle_s": 5.0, "group_size": 4}
    with fine_tuning(tmp_path / "jobs", system.stack.gateway_url, ADMIN_KEY, **settings) as service:
        held_out = service.upload(sums(4))
        body = {"validation_file": held_out, "seed": 0}
        made = service.start(sums(8), HAS_AN_E, n_epochs=4, eval_interval=2, body=body)
        job = service.ended(made.id, 600)
        assert (job.status, job.error) == ("succeeded", None)
        checkpoints = list(service.openai.fine_tuning.jobs.checkpoints.list(job.id, limit=2))
        events = list(service.openai.fine_tuning.jobs.list_events(job.id, limit=100))
    last = int((job.fine_tuned_model or "").removeprefix("policy@"))
    assert last > before
    names = [each.fine_tuned_model_checkpoint for each in checkpoints]
    assert names == [f"policy@{version}" for version in range(last, last - len(names), -1)]
    assert 0 < len(names) <= last - before
    steps = [each.step_number for each in checkpoints]
    assert steps == sorted(steps, reverse=True)
    metrics: list[Any] = [event.data for event in events if event.type == "metrics"]
    assert any(0 < each["reward_mean"] < 1 for each in metrics if "reward_mean" in each)
    evaluations = [each for each in metrics if "valid_reward_mean" in each]
    assert len(evaluations) >= 2
    assert all(each["valid_answers"] == 4 and each["valid_failed"] == 0 for each in evaluations)
    mine = [
        each
        for each in system.get("/sessions?limit=1000", key=ADMIN_KEY)["data"]
        if job.id in each["session_id"]
    ]
    codes = Counter(each["verdict"]["code"] for each in mine)
    assert codes["trained"] > 0
    assert codes["not_for_training"] == 4 * len(evaluations)
    with openai.OpenAI(base_url=f"{system.stack.gateway_url}/v1", api_key=ADMIN_KEY) as client:
        answer = client.chat.completions.create(
            model=job.fine_tuned_model or "", messages=[{"role": "user", "content": "hi"}], max_tokens=4
        )
    assert answer.choices[0].message.role == "assistant"
