"""A trainer that owes many turns is killed while it acknowledges them, and the next one goes on."""

import pytest

from bench.owed import measure
from tests.support.redis_process import redis_executable


@pytest.mark.long
def test_trainers_that_are_killed_while_they_acknowledge_lose_nothing_and_count_nothing_twice() -> None:
    found = measure(redis_executable(), turns=20_000, kills=3)
    assert found.scripts > 2 * 20_000 // 250
