"""The LoRA adapters in the engine: loaded beside each other, each under a name of its own."""

from collections.abc import Mapping

from rollout_server.engine.control import EngineControl, EngineFailed
from rollout_server.weights.policy import LocalPolicy


class EngineAdapters:
    """The adapters that calls may name, since the engine's start."""

    def __init__(self, client: EngineControl) -> None:
        self._client = client
        self._loaded: dict[str, LocalPolicy] = {}

    @property
    def loaded(self) -> Mapping[str, LocalPolicy]:
        """By their names in the engine, in the order of their loading."""
        return self._loaded

    async def load(self, policy: LocalPolicy) -> None:
        """Load the adapter of a policy, if it is one, unless the engine has it. Requests that run go on.

        Raises AdapterRefused, EngineFailed.
        """
        name = policy.adapter_name
        if name is not None and name not in await self._client.adapters():
            await self._client.load_adapter(name, str(policy.directory))

    async def prove(self, policy: LocalPolicy) -> None:
        """Check that the engine has the adapter of a policy and samples with it. It must not be paused.

        Raises EngineFailed.
        """
        name = policy.adapter_name
        if name is None:
            return
        if name not in await self._client.adapters():
            raise EngineFailed(f"the engine does not have the adapter {name}")
        await self._client.try_adapter(name)

    def note(self, policy: LocalPolicy) -> None:
        """Let calls name the adapter of a policy, if it is one: it is proved over the weights that the
        engine serves."""
        if (name := policy.adapter_name) is not None:
            self._loaded.pop(name, None)
            self._loaded[name] = policy

    def forget(self, name: str) -> None:
        """Let calls not name an adapter any more. The engine drops it when it needs the room."""
        del self._loaded[name]

    def keep_only_of(self, weights: LocalPolicy) -> None:
        """Forget the adapters of other weights: with these, they would be other models."""
        self._loaded = {name: each for name, each in self._loaded.items() if each.base == weights}

    def clear(self) -> None:
        """The engine starts again."""
        self._loaded.clear()
