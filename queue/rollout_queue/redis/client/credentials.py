"""A password that stands in a file."""

from pathlib import Path

from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError


class PasswordFile(CredentialProvider):
    """Reads the file whenever a connection is opened, so that the password may be changed at any time."""

    def __init__(self, path: Path, user: str | None = None) -> None:
        self._path, self._user = path, user

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Raises redis' ConnectionError, so that a service waits for the file as it waits for Redis."""
        try:
            password = self._path.read_text(encoding="utf-8").strip("\r\n")
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise RedisConnectionError(f"the password file {self._path} cannot be read: {reason}") from None
        return (password,) if self._user is None else (self._user, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()
