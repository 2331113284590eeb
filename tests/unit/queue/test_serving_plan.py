"""The numbers of pushes, canaries and pins."""

from rollout_queue.contract.policies.serving import ServingPlan


def test_numbers_grow_in_one_moment_and_after_a_loss_of_the_plan() -> None:
    plan, given = ServingPlan(), []
    for version in range(3):
        plan = plan.begun(version, 1000.0, force=False)
        assert plan.push is not None
        given.append(plan.push.id)
    assert given == sorted(set(given))
    assert ServingPlan().next_id(1001.0) > given[-1]
