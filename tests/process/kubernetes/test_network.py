"""The network policies admit the connections that Weir needs, and no other."""

from tests.support.kubernetes.pods import Pod, ports
from tests.support.kubernetes.policies import Network, Peer, pairs
from tests.support.kubernetes.rendered import Object, of_kind

EVERYWHERE = {
    "gateway > redis:6379",
    "trainer > redis:6379",
    "rollout-server > gateway:8000",
    "trainer > gateway:8000",
    "gateway > rollout-server:8100",
    "gateway > rollout-server:30000",
    "rollout-server > rollout-server:8100",
    "gateway > trainer:8200",
    "rollout-server > trainer:8200",
    # From outside of the namespace, and pods of agents inside.
    "an agent > gateway:8000",
    "a namespace of agents > gateway:8000",
    "ingress-nginx > gateway:8000",
    "prometheus > gateway:8000",
    "prometheus > rollout-server:8100",
    "prometheus > rollout-server:30000",
    "prometheus > trainer:8200",
}
OWN = {
    "cpu-demo": {"agent > gateway:8000"},
    "gpu-node": set(),
    "fleet": {f"trainer > trainer:{port}" for port in (8200, 29400, 40000)},
}
OTHERS = [
    Peer("an agent", {"weir/agent": "true"}, "weir", {}),
    Peer("a stranger here", {}, "weir", {}),
    Peer("a namespace of agents", {}, "bots", {"weir/agents": "true"}),
    Peer("a stranger", {"weir/agent": "true", "app.kubernetes.io/name": "gateway"}, "default", {}),
    Peer("ingress-nginx", {}, "ingress-nginx", {}),
    Peer("prometheus", {"app.kubernetes.io/name": "prometheus"}, "monitoring", {}),
]
RANKS = 40000
"""A port as NCCL chooses them."""


def test_the_policies_admit_exactly_the_pairs_that_are_needed(
    overlay: str, objects: list[Object], pods: dict[str, Pod]
) -> None:
    policies = of_kind(objects, "NetworkPolicy")
    inside = {name: Peer(name, pod.labels, "weir", {}) for name, pod in pods.items()}
    targets = {name: (peer, [*ports(pods[name].main).values()]) for name, peer in inside.items()}
    targets["trainer"] = (inside["trainer"], [*targets["trainer"][1], RANKS])

    def admitted(left_out: str = "") -> set[str]:
        kept = [policy for name, policy in policies.items() if name != left_out]
        return pairs(Network("weir", kept), [*inside.values(), *OTHERS], targets)

    assert admitted() == EVERYWHERE | OWN[overlay]
    for each in ("gateway", "redis"):
        assert admitted(left_out=each) != admitted(), f"nobody would miss the policy of {each}"


def test_pods_reach_nothing_outside_but_names(
    overlay: str, objects: list[Object], pods: dict[str, Pod]
) -> None:
    """NodeLocal DNSCache has an address. The Job that fetches a model reaches public ones by https."""
    policies = list(of_kind(objects, "NetworkPolicy").values())
    blocks = [
        (policy["metadata"]["name"], peer["ipBlock"], rule["ports"])
        for policy in policies
        for rule in policy["spec"].get("egress", [])
        for peer in rule.get("to", [{"ipBlock": "anywhere"}])
        if "ipBlock" in peer
    ]
    names = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
    assert ("names", {"cidr": "169.254.20.10/32"}, names) in blocks
    if overlay == "cpu-demo":
        assert len(blocks) == 1
        return
    ((name, block, allowed),) = (each for each in blocks if each[0] != "names")
    assert (name, allowed) == ("model", [{"port": 443, "protocol": "TCP"}])
    assert {"10.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"} <= set(block["except"])
