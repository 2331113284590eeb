"""Finds the policy version that must answer a call: the model name `policy@12` pins a call to version 12."""

from gateway.engines.fleet import Fleet
from gateway.errors import InvalidRequest, ObjectNotFound
from gateway.settings import GatewaySettings


def pinned_version(
    settings: GatewaySettings, fleet: Fleet, model: str | None, policy: str | None
) -> int | None:
    """The version that `model` names, or else the session's `policy`; None if neither names one.

    Raises ObjectNotFound for a model or version that nobody serves, InvalidRequest for a malformed version.
    """
    name, at, _ = (model or settings.model_name).partition("@")
    if name != settings.model_name:
        if settings.strict_models:
            raise ObjectNotFound(f"no model {model!r}", param="model", code="model_not_found")
        at = ""  # agents' harnesses hard-code model names, so the policy answers for every other name
    named = model if at else policy
    number = None if named is None else version_in(named, "model")
    if number is not None and not fleet.has(number):
        raise ObjectNotFound(f"no server serves version {number}", param="model", code="model_not_found")
    return number


def version_in(name: str, param: str) -> int | None:
    """The version in a name such as `policy@12`; None without one. Raises InvalidRequest if no number."""
    _, at, version = name.partition("@")
    if not at:
        return None
    if not (version.isascii() and version.isdigit() and len(version) < 19):
        raise InvalidRequest(f"{param}: {name!r}: a version is a number", param=param)
    return int(version)
