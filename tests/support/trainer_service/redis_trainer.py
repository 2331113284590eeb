"""One trainer after the other on a real Redis, and the agents that write into it."""

import json
from typing import Any, cast

from redis import Redis

from rollout_queue.redis import key_names
from tests.support.claimed import claimed_reader
from tests.support.queue.memory_stream import MemoryStream
from tests.support.serving import NOBODY
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.redis_agents import RedisAgents
from weir.audit.audit import audit
from weir.audit.audit_facts import Finding
from weir.audit.audit_sources import Sources


class RedisTrainer:
    """The present trainer, and what Redis and its checkpoints say."""

    def __init__(self, make_harness: MakeHarness, redis: Redis, url: str) -> None:
        self.redis, self.url, self._make_harness = redis, url, make_harness
        redis.hset(key_names.POLICIES, "0", "{}")
        self.agents = RedisAgents(url)
        self.harness = self.start()

    def start(self, disk: str = "run", **algorithm: Any) -> Harness:
        """A new process, with the disk of the one before it, which is dead."""
        stream = cast(MemoryStream, claimed_reader(self.redis))
        self.harness = self._make_harness(disk, stream=stream, algorithm=algorithm).start()
        return self.harness

    def runs_once(self) -> bool:
        """Whether the trainer makes a step."""
        return self.harness.trainer.run_once()

    def trained(self) -> list[list[str]]:
        """The sessions of each durable step."""
        return [sorted(row.sessions) for row in self.harness.ledger]

    def verdict(self, session_id: str) -> tuple[str, str] | None:
        told: Any = self.redis.hget(key_names.session(session_id), "verdict")
        return (json.loads(told)["code"], json.loads(told)["detail"]) if told else None

    def codes(self) -> dict[str, str | None]:
        names = [
            key.decode().removeprefix(key_names.session(""))
            for key in self.redis.scan_iter(key_names.session("*"))
        ]
        return {name: (self.verdict(name) or (None,))[0] for name in names}

    def pending(self) -> int:
        """How many delivered entries are not acknowledged. Checks that all entries are delivered."""
        (group,) = cast(Any, self.redis.xinfo_groups(key_names.STREAM))
        newest = cast(Any, self.redis.xinfo_stream(key_names.STREAM))["last-generated-id"]
        assert group["last-delivered-id"] == newest
        return int(group["pending"])

    def findings(self) -> tuple[Finding, ...]:
        """The faults that an audit finds."""
        sources = Sources(self.url, NOBODY, checkpoint_dir=self.harness.settings.checkpoint_dir)
        return tuple(audit(sources, readings=1).findings)
