"""Canaries: which groups they answer, what their gates decide, and what the fleet serves afterwards.

Each rollout server has an engine double, which scores as the test says.
"""

import pytest

from tests.support.gateway.canaries import (
    EVEN_ODDS,
    admin,
    begin,
    canary_of,
    gate,
    play,
    play_until_ended,
    state_of,
)
from tests.support.gateway.deployment import Deploy, gateway_thread
from tests.support.gateway.running import Backends
from tests.support.waiting import wait_until


def test_a_version_that_keeps_all_gates_is_promoted_and_no_group_is_divided(deploy: Deploy) -> None:
    deployment = deploy(3, canary=EVEN_ODDS)
    opened = begin(deployment, 1)
    assert (opened["baseline"], opened["share"], len(opened["servers"])) == (0, 0.5, 2)
    groups = play_until_ended(deployment, 1)
    assert all(len(versions) == 1 for versions in groups[:-1]), "the last one may see the promotion"
    assert {0} in groups
    assert {1} in groups
    canary = canary_of(deployment, 1)
    assert canary["state"] == "promoted", canary
    assert canary["groups"] >= 3
    states = {each["gate"]: each["state"] for each in canary["gates"]}
    assert states == {"kl": "holds", "reward": "holds", "errors": "holds"}
    assert gate(canary, "kl")["value"] == 0.0
    assert canary["reason"].startswith(f"{canary['groups']} of 3 groups; kl holds: 0")
    wait_until(lambda: deployment.versions() == [1, 1, 1])


def test_a_version_far_from_the_served_one_is_rolled_back_and_the_fleet_is_held(deploy: Deploy) -> None:
    """The served version gives the canary's tokens 1/20 of the probability that the canary gives them."""
    deployment = deploy(2, canary=EVEN_ODDS | {"min_groups": 1000})
    for server in deployment.servers:
        server.control(scores={"0": -4.0, "1": -1.0})
    begin(deployment, 1)
    play_until_ended(deployment, 1)
    canary = canary_of(deployment, 1)
    assert canary["state"] == "rolled_back"
    assert canary["groups"] < 1000
    assert gate(canary, "kl")["state"] == "broken"
    assert gate(canary, "kl")["value"] == pytest.approx(2.0497870683678638, rel=1e-12)  # exp(-3) - 1 + 3
    assert canary["reason"].startswith("kl broken: 2.05")
    wait_until(lambda: deployment.versions() == [0, 0])
    assert deployment.plan()["hold"]["reason"] == "held by an operator"
    (record,) = [each for each in admin(deployment, "GET", "").json()["data"] if each["version"] == 1]
    assert record["state"] == "failed"
    assert deployment.announce(2)["state"] == "held"
    assert admin(deployment, "POST", "/release").status_code == 200
    assert deployment.versions() == [2, 2]


@pytest.mark.parametrize(
    "why",
    [
        "an operator ends one that was served before",
        pytest.param("an operator ends it", marks=pytest.mark.long),
        pytest.param("an operator rolls back", marks=pytest.mark.long),
        pytest.param("its servers refuse it", marks=pytest.mark.long),
    ],
)
def test_a_version_whose_canary_was_rolled_back_is_not_released(deploy: Deploy, why: str) -> None:
    deployment = deploy(2, canary=EVEN_ODDS)
    if why == "its servers refuse it":
        admin(deployment, "POST", "/hold", {})
        deployment.announce(1, (deployment.directory / "absent").as_uri())
        assert admin(deployment, "POST", "/1/canary", {}).status_code == 200
    elif why == "an operator ends one that was served before":
        deployment.announce(1)
        wait_until(lambda: deployment.plan()["serving"] == 1)
        assert admin(deployment, "POST", "/rollback", {"to": 0, "hold": True}).status_code == 200
        wait_until(lambda: deployment.plan()["serving"] == 0)
        assert admin(deployment, "POST", "/1/canary", {}).status_code == 200
        wait_until(lambda: state_of(deployment, 1) == "open")
    else:
        begin(deployment, 1)
    if why == "an operator rolls back":
        assert admin(deployment, "POST", "/rollback", {"to": 0}).status_code == 200
    elif why.startswith("an operator ends"):
        assert admin(deployment, "DELETE", "/1/canary").status_code == 200
    wait_until(lambda: state_of(deployment, 1) == "rolled_back")
    wait_until(lambda: deployment.versions() == [0, 0])
    assert admin(deployment, "GET", "/1").json()["state"] == "failed"
    assert admin(deployment, "POST", "/release").json()["serving"] == 0
    assert (deployment.plan()["target"], deployment.versions()) == (0, [0, 0])
    promoted = admin(deployment, "POST", "/1/promote")
    if why == "its servers refuse it":
        assert promoted.json()["state"] == "failed"
        states = [each["state"] for each in admin(deployment, "GET", "").json()["data"]]
        assert states == ["serving", "failed"], "its number stays taken: a server may have sampled with it"
    else:
        assert promoted.status_code == 200, "an operator may insist"
        assert admin(deployment, "GET", "/1").json()["state"] == "serving"
        assert deployment.versions() == [1, 1]


@pytest.mark.long
def test_a_version_that_earns_less_is_rolled_back(deploy: Deploy) -> None:
    deployment = deploy(2, canary=EVEN_ODDS | {"min_groups": 50})
    begin(deployment, 1)
    play_until_ended(deployment, 1, lambda version, place: 0.0 if version == 1 else 0.9 + place / 10)
    reward = gate(canary_of(deployment, 1), "reward")
    assert (reward["state"], round(reward["value"], 9)) == ("broken", -0.95)
    assert reward["low"] <= reward["value"] <= reward["high"] < -0.1


@pytest.mark.long
def test_a_group_that_was_opened_before_the_canary_stays_with_the_served_version(deploy: Deploy) -> None:
    deployment = deploy(2, canary=EVEN_ODDS | {"share": 0.99, "min_groups": 1000})
    gateway = deployment.gateway
    for index in range(10):
        gateway.session(group_id=f"g{index}")
    begin(deployment, 1)
    late = [gateway.session(group_id=f"g{index}") for index in range(10)]
    new = [gateway.session(group_id=f"new-{index}") for index in range(10)]
    for ticket in late + new:
        gateway.chat(session=ticket)
    versions = [[turn["versions"][0]["version"] for turn in gateway.turns(t)] for t in late + new]
    assert versions[:10] == [[0]] * 10
    assert [1] in versions[10:]


def test_no_call_fails_when_the_only_server_of_a_canary_or_of_its_baseline_is_killed(deploy: Deploy) -> None:
    """Its calls are answered by the other version, which counts as errors."""
    deployment = deploy(2, canary=EVEN_ODDS | {"min_groups": 1000})
    begin(deployment, 1)
    (name,) = canary_of(deployment, 1)["servers"]
    deployment.servers.pop(int(name[1:])).kill()
    groups = play_until_ended(deployment, 1)
    assert set().union(*groups) == {0}
    canary = canary_of(deployment, 1)
    assert (canary["state"], gate(canary, "errors")["state"]) == ("rolled_back", "broken")
    assert deployment.versions() == [0]


@pytest.mark.long
def test_an_operator_ends_a_canary_and_versions_that_waited_are_served(deploy: Deploy) -> None:
    deployment = deploy(3, canary=EVEN_ODDS | {"min_groups": 1000})
    begin(deployment, 1)
    refused = admin(deployment, "POST", "/1/canary", {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "canary_open")
    assert admin(deployment, "POST", "/release").json()["push"] is None
    assert deployment.announce(2)["state"] == "canary"
    assert admin(deployment, "POST", "/1/promote").status_code == 200
    assert canary_of(deployment, 1)["state"] == "promoted"
    assert deployment.versions() == [1, 1, 1]
    listed = admin(deployment, "GET", "/canaries").json()["data"]
    assert [(each["version"], each["state"]) for each in listed] == [(1, "promoted")]
    assert admin(deployment, "DELETE", "/1/canary").status_code == 404
    assert admin(deployment, "GET", "/2/canary").status_code == 404


def test_a_fleet_that_cannot_be_divided_has_no_canary(deploy: Deploy) -> None:
    deployment = deploy(1)
    admin(deployment, "POST", "/hold", {})
    deployment.announce(1)
    refused = admin(deployment, "POST", "/1/canary", {})
    assert (refused.status_code, "two live rollout servers" in refused.text) == (409, True)
    for body in ({"share": 1}, {"sticky": "call"}, {"gates": {"min_groups": 0}}, {"gates": {"max_cost": 1}}):
        assert admin(deployment, "POST", "/1/canary", body).status_code == 400, body
    assert admin(deployment, "POST", "/7/canary", {}).status_code == 404
    assert admin(deployment, "POST", "/0/canary", {}).status_code == 409


@pytest.mark.long
def test_every_version_of_a_trainer_passes_through_a_canary(deploy: Deploy) -> None:
    deployment = deploy(2, canary=EVEN_ODDS, auto_canary=True)
    assert deployment.announce(1)["state"] == "canary"
    wait_until(lambda: state_of(deployment, 1) == "open")
    assert deployment.announce(2)["state"] == "canary"
    for server in deployment.servers:
        server.control(scores={"0": -4.0, "1": -4.0, "2": -1.0})
    play_until_ended(deployment, 1)
    assert state_of(deployment, 1) == "promoted"
    wait_until(lambda: state_of(deployment, 2) == "open")
    play_until_ended(deployment, 2)
    canary = canary_of(deployment, 2)
    assert (canary["state"], canary["baseline"], canary["automatic"]) == ("rolled_back", 1, True)
    plan = deployment.plan()
    assert (plan["serving"], plan["hold"]) == (1, None), "the next version has a canary of its own"
    assert deployment.announce(3)["state"] == "canary"
    wait_until(lambda: state_of(deployment, 3) in ("opening", "open"))


@pytest.mark.long
def test_a_version_that_is_released_passes_through_a_canary_if_every_one_does(deploy: Deploy) -> None:
    deployment = deploy(2, canary=EVEN_ODDS, auto_canary=True)
    admin(deployment, "POST", "/hold", {})
    assert deployment.announce(1)["state"] == "held"
    released = admin(deployment, "POST", "/release").json()
    assert (released["hold"], released["target"]) == (None, 0)
    wait_until(lambda: state_of(deployment, 1) == "open")
    play_until_ended(deployment, 1)
    wait_until(lambda: deployment.versions() == [1, 1])
    assert admin(deployment, "POST", "/rollback", {"to": 0}).status_code == 200
    assert admin(deployment, "POST", "/release").json()["target"] == 1, "it has been served before"
    assert deployment.versions() == [1, 1]


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves the fleet", "stays dead"])
@pytest.mark.long
def test_a_canary_whose_server_goes_away_before_it_opens_is_rolled_back(deploy: Deploy, leaves: bool) -> None:
    """Without a server of the canary, nothing is left to wait for. A dead one may come back until the
    canary's time is over."""
    deployment = deploy(2, canary={"deadline_s": 3600.0 if leaves else 3.0}, auto_canary=True)
    for server in deployment.servers:
        server.control(load_s=600.0)
    deployment.announce(1)
    wait_until(lambda: state_of(deployment, 1) == "opening")
    (name,) = canary_of(deployment, 1)["servers"]
    deployment.servers.pop(int(name[1:])).kill()
    if leaves:
        assert deployment.gateway.admin("DELETE", f"/rollout_servers/{name}").is_success
    wait_until(lambda: state_of(deployment, 1) == "rolled_back")
    reason = "left the fleet" if leaves else "not loaded within 3 s"
    assert reason in canary_of(deployment, 1)["reason"]
    deployment.servers[0].control()
    deployment.announce(2)
    wait_until(lambda: deployment.versions() == [2])


@pytest.mark.long
def test_a_version_for_a_single_server_is_pushed_without_a_canary(deploy: Deploy) -> None:
    deployment = deploy(1, auto_canary=True)
    assert deployment.announce(1)["state"] == "canary"
    wait_until(lambda: deployment.versions() == [1])
    assert state_of(deployment, 1) == "none"


# The loop of a gateway that is killed ends with open connections.
@pytest.mark.filterwarnings("ignore:unclosed resource:ResourceWarning")
def test_another_gateway_decides_about_the_canary_of_one_that_is_killed(
    own_backends: Backends, deploy: Deploy
) -> None:
    with gateway_thread(own_backends, canary=EVEN_ODDS) as (first, one):
        deployment = deploy(2, gateway=one)
        with gateway_thread(own_backends, canary=EVEN_ODDS) as (_, other):
            begin(deployment, 1, {"gates": {"min_groups": 6, "max_length_change": None}})
            for _ in range(4):
                play(other)
            first.kill()
            deployment.gateway = other
            play_until_ended(deployment, 1)
            canary = canary_of(deployment, 1)
            assert (canary["state"], canary["groups"] >= 6) == ("promoted", True)
            wait_until(lambda: deployment.versions() == [1, 1])


# Pins


def test_a_pinned_server_keeps_its_version_for_calls_that_name_it(deploy: Deploy) -> None:
    deployment = deploy(3)
    gateway = deployment.gateway
    (pin,) = admin(deployment, "POST", "/0/pin", {}).json()["data"]
    assert (pin["version"], pin["server"]) == (0, "r0")
    deployment.announce(1)
    push = deployment.until("serving")
    assert push["capacity"] == 0.5, "the pinned server is no part of it"
    assert deployment.versions() == [0, 1, 1]
    old = gateway.session(train=False)
    assert gateway.chat(session=old, model="policy@0").status_code == 200
    assert [turn["engine"] for turn in gateway.turns(old)] == ["r0"]
    for _ in range(8):
        assert play(gateway) == {1}
    needed = admin(deployment, "DELETE", "/0")
    assert (needed.status_code, needed.json()["error"]["code"]) == (409, "needed")
    assert [each["server"] for each in deployment.plan()["pins"]] == ["r0"]
    assert admin(deployment, "DELETE", "/0/pin").json()["data"] == []
    wait_until(lambda: deployment.versions() == [1, 1, 1])
    assert admin(deployment, "DELETE", "/0/pin").status_code == 404


@pytest.mark.long
def test_a_pin_brings_a_server_to_an_older_version_and_leaves_one_for_the_fleet(deploy: Deploy) -> None:
    deployment = deploy(2)
    deployment.announce(1)
    deployment.until("serving")
    assert admin(deployment, "POST", "/0/pin", {"servers": ["r1"]}).status_code == 200
    wait_until(lambda: deployment.versions() == [1, 0])
    for servers, status in ((["r0"], 409), (2, 409), (["r9"], 404), (0, 400), ([], 400)):
        assert admin(deployment, "POST", "/0/pin", {"servers": servers}).status_code == status, servers
    assert admin(deployment, "POST", "/9/pin", {}).status_code == 404
    deployment.announce(2)
    deployment.until("serving")
    assert deployment.versions() == [2, 0]
