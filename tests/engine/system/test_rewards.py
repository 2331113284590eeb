"""The reward service on the whole system: the trainer learns from rewards, and the engine answers judges."""

from typing import Any

import pytest

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
