"""What the gateway's rooms raise when a call cannot be answered: errors of the domain, without HTTP.

GatewayError
├─ InvalidRequest      the request contradicts itself, or asks for what the gateway cannot do
│  └─ RequestRefused   an engine found the request at fault
├─ UnknownCaller       no API key was given, or one that is not known
├─ NotPermitted        the key that was given does not allow this
├─ ObjectNotFound      the session, policy or server that is named does not exist, or belongs to another key
├─ StateConflict       what is asked for contradicts what is stored; the same request fails again
├─ LimitReached        a limit of the deployment; the request may succeed after `retry_s` seconds
├─ NoServer            no rollout server can take the call
└─ EngineFault         an engine failed while it made an answer; another engine may continue it

`gateway.edge.errors` says which HTTP status each of them has, and what of the queue's own errors
(`rollout_queue.contract.errors`) a client is told.
"""

from typing import Literal

FaultReason = Literal["refused", "lost", "broken", "stalled", "aborted", "busy", "failed", "nonsense"]


class GatewayError(Exception):
    """`message` is a sentence for the caller, `param` the field at fault, `code` a word for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(GatewayError):
    """The request contradicts itself, or asks for what the gateway cannot do."""


class RequestRefused(InvalidRequest):
    """An engine found the request at fault: every other engine would as well."""


class UnknownCaller(GatewayError):
    """No API key was given, or one that is not known."""


class NotPermitted(GatewayError):
    """The key that was given does not allow what is asked for."""


class ObjectNotFound(GatewayError):
    """What the request names does not exist, or belongs to another key."""


class StateConflict(GatewayError):
    """What is asked for contradicts what is stored; the same request fails again."""


class LimitReached(GatewayError):
    """A limit of the deployment is used up. The request may succeed after `retry_s` seconds."""

    def __init__(self, message: str, *, code: str, retry_s: int) -> None:
        super().__init__(message, code=code)
        self.retry_s = retry_s


class NoServer(GatewayError):
    """No rollout server can take the call."""


class EngineFault(GatewayError):
    """An engine failed while it made an answer. The request is not the cause; another engine may continue.

    refused   nothing listens at its address
    lost      the connection ended before any answer: it was stale, or the engine has just died
    broken    the connection ended in the middle of the answer
    stalled   nothing arrived for too long
    aborted   the engine aborted the answer
    busy      its queue is full
    failed    it answered with an error
    nonsense  its answer contradicts itself
    """

    def __init__(self, reason: FaultReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
