"""What a caller hears when no server can take the call."""

from typing import Any, cast

import pytest

from gateway.engines.fleet import DESCRIBED, Fleet


@pytest.mark.parametrize(("servers", "end"), [(1, ""), (DESCRIBED, ""), (DESCRIBED + 2, ", and 2 more")])
def test_the_first_servers_are_described_and_the_others_counted(servers: int, end: str) -> None:
    nobody = cast(Any, None)
    fleet = Fleet(nobody, nobody, None, [f"http://engine-{number}" for number in range(servers)])
    reason = fleet.why_no_server()
    assert reason.count("its breaker") == min(servers, DESCRIBED)
    assert reason.endswith(f"its breaker closed{end}")
