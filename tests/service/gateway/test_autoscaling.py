"""Servers that an autoscaler starts and stops under load: no call fails, and no turn is lost."""

from tests.support.gateway.deployment import Deploy, ready, traffic
from tests.support.gateway.running import ADMIN_KEY
from tests.support.waiting import wait_until


def test_servers_join_and_leave_by_themselves_while_calls_go_on(deploy: Deploy) -> None:
    deployment = deploy(2, engine_wait_s=120.0)  # the machine may be busy
    deployment.announce(1)
    deployment.until("serving")
    gateway = deployment.gateway
    with traffic(gateway, per_s=10.0) as seen:
        added = deploy(1, gateway=gateway, first=2)
        wait_until(lambda: ready(gateway) == 3)
        assert added.versions() == [1], "it has loaded the served version before it gets calls"
        wait_until(lambda: added.servers[0].answers)
        deployment.servers[0].leave()
        added.servers[0].kill()
        wait_until(lambda: ready(gateway) == 1)
    assert set(seen.statuses) == {200}
    assert len(list(seen.turns())) == len(seen.sessions)
    placement = gateway.get("/admin/status", key=ADMIN_KEY).json()["placement"]
    assert sum(placement["placed"].values()) >= len(seen.sessions)
    assert placement["waiting"] == 0
