"""A canary outlives the gateway that decides about it."""

from pathlib import Path

from tests.support.gateway.canaries import EVEN_ODDS, begin, canary_of, play, play_until_ended
from tests.support.gateway.deployment import Deploy, gateway_process
from tests.support.gateway.running import Backends
from tests.support.waiting import wait_until


def test_another_gateway_decides_about_the_canary_of_one_that_is_killed(
    own_backends: Backends, deploy: Deploy, tmp_path: Path
) -> None:
    settings = {f"canary__{name}": value for name, value in EVEN_ODDS.items() if value is not None}
    with gateway_process(own_backends, tmp_path, **settings) as (first, one):
        deployment = deploy(2, gateway=one)
        with gateway_process(own_backends, tmp_path, **settings) as (_, other):
            begin(deployment, 1, {"gates": {"min_groups": 6, "max_length_change": None}})
            for _ in range(4):
                play(other)
            first.kill()
            deployment.gateway = other
            play_until_ended(deployment, 1)
            canary = canary_of(deployment, 1)
            assert (canary["state"], canary["groups"] >= 6) == ("promoted", True)
            wait_until(lambda: deployment.versions() == [1, 1])
