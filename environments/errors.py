"""The failures of environments. Each is told apart by who is at fault, because a verdict depends on it."""


class EnvironmentFault(Exception):
    """An environment, its host or its library failed: the episode is `failed`, and is never trained."""


class HostDied(EnvironmentFault):
    """The process of the environment ended, or did not answer in time and was killed."""


class NoAction(Exception):
    """The model's answer is no action of the environment. The model reads why, and tries again."""


class UnknownEnvironment(Exception):
    """The user named an environment that does not exist, or whose library is not installed."""


class GatewayFault(Exception):
    """The gateway refused a request of the runner, or did not answer for longer than the runner waits."""


class SessionRefused(GatewayFault):
    """The gateway refused a request about one session, for instance because it has expired or was deleted."""


class RunStopped(Exception):
    """The run ended early, for the reason in the message."""


CONTEXT_IS_FULL = "the conversation does not fit into the model's context"
"""Why an episode was truncated that `fills_context`."""


def fills_context(error: BaseException) -> bool:
    """Whether the gateway has refused a call because of its length: an error of OpenAI's client has its code,
    one of Anthropic's the reply."""
    body = getattr(error, "body", None)
    inner = body.get("error") if isinstance(body, dict) else None
    codes = (getattr(error, "code", None), inner.get("code") if isinstance(inner, dict) else None)
    return "context_length_exceeded" in codes
