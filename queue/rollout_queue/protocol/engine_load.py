"""The load of an engine, as SGLang's `GET /v1/loads` tells rollout servers and gateways."""

import msgspec


class RankLoad(msgspec.Struct, frozen=True):
    """The load of one data-parallel rank."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float | None = None
    """The share of the key-value cache that running requests have, without cached prefixes of no request."""


class EngineLoads(msgspec.Struct, frozen=True):
    """The answer of the route."""

    loads: tuple[RankLoad, ...] = ()

    @property
    def running(self) -> int:
        return sum(load.num_running_reqs for load in self.loads)

    @property
    def waiting(self) -> int:
        return sum(load.num_waiting_reqs for load in self.loads)

    @property
    def requests(self) -> int:
        """Those that run or wait."""
        return self.running + self.waiting

    @property
    def kv_usage(self) -> float | None:
        """That of the fullest rank; None if the engine does not say."""
        return max((load.token_usage for load in self.loads if load.token_usage is not None), default=None)
