"""Finds the policy that must answer a call.

policy             any version that the fleet serves
policy@12          version 12
policy:math        the newest version of the adapter `math`
policy:math@3      its version 3
"""

from typing import NamedTuple

from gateway.errors import InvalidRequest, ObjectNotFound
from gateway.fleet.fleet import Fleet
from gateway.policies.adapter_policies import AdapterPolicies
from gateway.settings import GatewaySettings


class PolicyName(NamedTuple):
    """A policy as a caller names it."""

    base: str
    adapter: str | None
    version: int | None


class Pinned(NamedTuple):
    """What must answer a call; without a version, any that the fleet serves."""

    version: int | None = None
    adapter: str | None = None
    """The name of the adapter whose version that is; None for the fleet's policy."""

    def name(self, model_name: str) -> str:
        """As in the record of a turn."""
        adapter = "" if self.adapter is None else f":{self.adapter}"
        return f"{model_name}{adapter}" + ("" if self.version is None else f"@{self.version}")


async def pinned(
    settings: GatewaySettings, fleet: Fleet, adapters: AdapterPolicies, model: str | None, policy: str | None
) -> Pinned:
    """What `model` names, or else the session's `policy`.

    Raises ObjectNotFound for a model or version that nobody serves, InvalidRequest for a malformed version.
    """
    named = policy_name(model or settings.model_name, "model")
    if named.base != settings.model_name:
        if settings.strict_models:
            raise ObjectNotFound(f"no model {model!r}", param="model", code="model_not_found")
        named = PolicyName(named.base, None, None)  # harnesses hard-code names: the policy answers them
    if named.adapter is None and named.version is None and policy is not None:
        named = policy_name(policy, "policy")
    if named.adapter is not None:
        return Pinned(await adapters.version_of(named.adapter, named.version), named.adapter)
    if named.version is not None and not fleet.has(named.version):
        how = f"POST /admin/policies/{named.version}/pin has one keep it"
        message = f"no server serves version {named.version}; {how}"
        raise ObjectNotFound(message, param="model", code="model_not_found")
    return Pinned(named.version)


def policy_name(name: str, param: str) -> PolicyName:
    """The parts of a name such as `policy:math@3`. Raises InvalidRequest if the version is no number."""
    whole, at, version = name.partition("@")
    base, _, adapter = whole.partition(":")
    if not at:
        return PolicyName(base, adapter or None, None)
    if not (version.isascii() and version.isdigit() and len(version) < 19):
        raise InvalidRequest(f"{param}: {name!r}: a version is a number", param=param)
    return PolicyName(base, adapter or None, int(version))
