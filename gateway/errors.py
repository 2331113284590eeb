"""The errors that the gateway's packages raise when they cannot answer a call. They know nothing of HTTP.

GatewayError
├─ InvalidRequest      the request is malformed, contradicts itself, or asks for an unsupported feature
│  ├─ RequestRefused   an engine refused the request
│  └─ KillsEngines     two engines have died of the request
├─ UnknownCaller       the request has no API key, or an unknown one
├─ NotPermitted        the request's key does not allow this
├─ ObjectNotFound      the named session, policy or server does not exist, or belongs to another key
├─ StateConflict       the request contradicts the stored state; the same request fails again
├─ LimitReached        a limit is used up; the request may succeed after `retry_s` seconds
├─ NoServer            no rollout server can take the call
└─ EngineFault         an engine failed while it made an answer; another engine may continue it

`gateway.edge.errors` gives each class its HTTP status. It also turns the queue's errors
(`rollout_queue.contract.errors`) into replies.
"""

from typing import Literal

FaultReason = Literal[
    "refused", "lost", "broken", "stalled", "aborted", "busy", "failed", "nonsense", "no_tokenizer"
]


class GatewayError(Exception):
    """`message` is a sentence for the caller, `param` the wrong field, `code` a word for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(GatewayError):
    """The request is malformed, contradicts itself, or asks for a feature that the gateway lacks."""


def invalid(param: str, why: str, code: str | None = None) -> InvalidRequest:
    """The refusal of one field, whose name begins the sentence."""
    return InvalidRequest(f"{param}: {why}", param=param, code=code)


class RequestRefused(InvalidRequest):
    """An engine refused the request. Every other engine would refuse it as well."""


class KillsEngines(InvalidRequest):
    """Two engines have died of the request. No other engine gets it for some minutes."""

    def __init__(self) -> None:
        super().__init__(
            "two engines died while they worked on this request, so no other engine gets it for ten minutes: "
            "change the request",
            code="kills_engines",
        )


class UnknownCaller(GatewayError):
    """The request has no API key, or an unknown one."""


class NotPermitted(GatewayError):
    """The request's key does not allow this request."""


class ObjectNotFound(GatewayError):
    """The named object does not exist, or belongs to another key."""


class StateConflict(GatewayError):
    """The request contradicts the stored state; the same request fails again."""


class LimitReached(GatewayError):
    """A limit is used up. The request may succeed after `retry_s` seconds, or never if that is None."""

    def __init__(self, message: str, *, code: str, retry_s: int | None) -> None:
        super().__init__(message, code=code)
        self.retry_s = retry_s


class NoServer(GatewayError):
    """No rollout server can take the call."""


class EngineFault(GatewayError):
    """An engine failed while it made an answer. The request is not the cause; another engine may continue.

    refused   no process listens at the engine's address
    lost      the connection ended before any answer: it was idle for too long, or the engine has just died
    broken    the connection ended in the middle of the answer
    stalled   the engine sent nothing for too long
    aborted   the engine aborted the answer
    busy      the engine's queue is full
    failed    the engine answered with an error
    nonsense  the engine's answer contradicts itself
    """

    def __init__(self, reason: FaultReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
