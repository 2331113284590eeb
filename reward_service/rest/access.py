"""Who may call a route: everybody with a key, or admins."""

from fastapi import Request

from rollout_queue.http.errors import ApiError
from rollout_queue.http.keys import Keyring, Role, presented_key


class Access:
    """The roles of callers, by their keys."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    def role(self, request: Request) -> Role:
        """Raises ApiError: 401 for no key, or an unknown one."""
        key = presented_key(request.headers)
        role = self._keyring.role_of(key)
        if role is None:
            raise ApiError(401, "no API key was given" if key is None else "the API key is not known")
        return role
