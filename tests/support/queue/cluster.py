"""A real cluster of six nodes: three masters with a replica each, made by commands."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout_queue.redis.key_names import slot_of, wire_prefix
from tests.support.queue.servers import RedisServer
from tests.support.serving import free_port
from tests.support.waiting import wait_until

SLOTS = 16384
BUS = 10_000
"""The nodes speak to each other at their port plus this."""


class Cluster:
    """Six nodes; `owner` is the one that has the keys of a deployment."""

    def __init__(
        self, directory: Path, flags: Sequence[str] = (), program: str | None = None, prefix: str = "weir"
    ) -> None:
        self._slot = slot_of(wire_prefix(prefix, cluster=True))
        common = ("cluster-enabled yes", "cluster-config-file nodes.conf", "cluster-node-timeout 1500")
        quick = ("repl-diskless-sync yes", "repl-diskless-sync-delay 0", "repl-ping-replica-period 1")
        self.nodes = [
            RedisServer(
                directory / name, *common, *quick, *flags, program=program, port=free_port(BUS)
            ).start()
            for name in map("node-{}".format, range(6))
        ]
        self._join()
        self.url = "redis+cluster://" + ",".join(node.address for node in self.nodes[:3])

    def _join(self) -> None:
        masters, replicas = self.nodes[:3], self.nodes[3:]
        for number, master in enumerate(masters):
            slots = range(number * SLOTS // 3, (number + 1) * SLOTS // 3)
            _ask(master, "CLUSTER ADDSLOTS", *slots)
            _ask(master, "CLUSTER SET-CONFIG-EPOCH", number + 1)
        wait_until(self._met)
        for master, replica in zip(masters, replicas, strict=True):
            _ask(replica, "CLUSTER REPLICATE", _ask(master, "CLUSTER MYID").decode())
        wait_until(self.complete)

    def _met(self) -> bool:
        """A node gives up to meet another that stands still for the timeout."""
        for node in self.nodes[1:]:
            _ask(node, "CLUSTER MEET", "127.0.0.1", self.nodes[0].port)
        with suppress(AssertionError):
            return wait_until(lambda: all(len(_flags(node)) == 6 for node in self.nodes), 3)
        return False

    @property
    def owner(self) -> RedisServer:
        """The master of the slot, as the nodes that live say."""
        for node in self.nodes:
            if node.process.poll() is None:
                for first, last, master, *_ in _ask(node, "CLUSTER SLOTS"):
                    if first <= self._slot <= last:
                        return next(each for each in self.nodes if each.port == master[1])
        raise AssertionError("nobody has the slot")

    @property
    def replica(self) -> RedisServer:
        """That of the owner."""
        owner = self.owner
        return next(each for each in self.nodes if self._follows(each, owner))

    def complete(self) -> bool:
        """Whether all nodes agree that all is well, and each master's replica has what the master has."""
        return all(self._content(node) for node in self.nodes) and self._in_step()

    def _content(self, node: RedisServer) -> bool:
        flags = _flags(node)
        return (
            _ask(node, "CLUSTER INFO")["cluster_state"] == "ok"
            and not any("fail" in each for each in flags)
            and sum("slave" in each for each in flags) == 3
        )

    def _in_step(self) -> bool:
        found: Any = self.owner.client.info("replication")
        return bool(found["connected_slaves"] == 1 and found["slave0"]["state"] == "online")

    def kill_owner(self) -> None:
        """Kill the master of the keys, wait until its replica has taken over, and start it again."""
        self.owner.kill()
        self.heal()

    def heal(self) -> None:
        """Wait until a replica has taken the place of the node that was killed, and start that node again."""
        (former,) = [node for node in self.nodes if node.process.poll() is not None]
        wait_until(lambda: self.owner is not former, 120)
        former.start()
        wait_until(self.complete, 120)

    def take_over(self) -> None:
        """Have the owner's replica take its place, in agreement with it."""
        replica = self.replica
        _ask(replica, "CLUSTER FAILOVER")
        wait_until(lambda: self.owner is replica, 120)
        wait_until(self.complete, 120)

    def _follows(self, node: RedisServer, master: RedisServer) -> bool:
        found: Any = node.client.info("replication")
        return bool(found["role"] == "slave" and found["master_port"] == master.port)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def _ask(node: RedisServer, command: str, *arguments: Any) -> Any:
    client: Any = node.client
    return client.execute_command(command, *arguments)


def _flags(node: RedisServer) -> list[str]:
    """What the node thinks of each of the nodes that it has met."""
    flags = (str(each["flags"]) for each in _ask(node, "CLUSTER NODES").values())
    return [each for each in flags if "handshake" not in each]
