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
