"""How many replicas of Redis must have what was written, before anybody is told that it is stored."""

from typing import NamedTuple

from redis.exceptions import TimeoutError as RedisTimeoutError


class Replication(NamedTuple):
    """How many replicas must have a record, and how long they may take. Of 0 replicas nothing is asked."""

    replicas: int = 0
    timeout_s: float = 1.0

    @property
    def command(self) -> tuple[str, str, str]:
        return "WAIT", str(self.replicas), str(max(1, round(self.timeout_s * 1000)))

    def require(self, confirmed: int) -> None:
        """Raises redis' TimeoutError: the record is stored, and its caller must not be told so."""
        if confirmed < self.replicas:
            raise RedisTimeoutError(
                f"{confirmed} of {self.replicas} replicas have the record after {self.timeout_s:g} s"
            )


NO_REPLICAS = Replication()
