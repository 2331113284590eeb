"""Who reaches whom, by the network policies of a namespace."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.kubernetes.rendered import Object


@dataclass(frozen=True)
class Peer:
    """A pod, seen by network policies."""

    name: str
    labels: Mapping[str, str]
    namespace: str
    """Its namespace, whose label `kubernetes.io/metadata.name` has this value."""
    namespace_labels: Mapping[str, str]


@dataclass(frozen=True)
class Network:
    """A namespace with its policies."""

    namespace: str
    policies: list[Object]

    def admits(self, source: Peer, target: Peer, port: int) -> bool:
        """Whether a TCP connection is possible: both ends have to allow it."""
        out = self._allows("Egress", source, target, port)
        return out and self._allows("Ingress", target, source, port)

    def _allows(self, direction: str, owner: Peer, other: Peer, port: int) -> bool:
        selecting = [each for each in self.policies if self._selects(each, direction, owner)]
        if not selecting:
            return True
        side, key = ("from", "ingress") if direction == "Ingress" else ("to", "egress")
        rules = [rule for each in selecting for rule in each["spec"].get(key, [])]
        return any(self._matches(rule, side, other, port) for rule in rules)

    def _selects(self, policy: Object, direction: str, owner: Peer) -> bool:
        spec = policy["spec"]
        return (
            owner.namespace == self.namespace
            and direction in spec["policyTypes"]
            and chosen(spec["podSelector"], owner.labels)
        )

    def _matches(self, rule: dict[str, Any], side: str, other: Peer, port: int) -> bool:
        wanted = [each["port"] for each in rule.get("ports", []) if each["protocol"] == "TCP"]
        if "ports" in rule and port not in wanted:
            return False
        return side not in rule or any(self._is(peer, other) for peer in rule[side])

    def _is(self, peer: dict[str, Any], other: Peer) -> bool:
        if "ipBlock" in peer:
            return False  # addresses outside of the cluster
        if "namespaceSelector" not in peer and other.namespace != self.namespace:
            return False
        namespace = {"kubernetes.io/metadata.name": other.namespace, **other.namespace_labels}
        return chosen(peer.get("namespaceSelector", {}), namespace) and chosen(
            peer.get("podSelector", {}), other.labels
        )


def chosen(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a selector chooses something with these labels. Only `matchLabels` is used here."""
    assert set(selector) <= {"matchLabels"}
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def pairs(network: Network, sources: list[Peer], targets: Mapping[str, tuple[Peer, list[int]]]) -> set[str]:
    """All connections that are possible, as `source > target:port`."""
    return set(_pairs(network, sources, targets))


def _pairs(
    network: Network, sources: list[Peer], targets: Mapping[str, tuple[Peer, list[int]]]
) -> Iterator[str]:
    for source in sources:
        for name, (target, ports) in targets.items():
            for port in ports:
                if network.admits(source, target, port):
                    yield f"{source.name} > {name}:{port}"
