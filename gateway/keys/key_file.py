"""Reads API keys from `gateway.keys_file`, a YAML file such as a mounted secret:

keys:
  - name: team-a
    role: client                # or admin
    secrets: ["…", "…"]         # or secrets_sha256: ["…"], which reveals nothing
    requests_per_minute: 600    # optional, like tokens_per_minute and token_budget
"""

import re
from collections import Counter
from pathlib import Path

import msgspec
import yaml

from gateway.keys.api_key import NAME, ApiKey, KeyLimits, Limit, Secret
from rollout_queue.http.keys import Role, digest
from rollout_queue.settings import is_secret

DIGEST = re.compile(r"[0-9a-f]{64}")


class WrongKeyFile(ValueError):
    """The file with the keys cannot be used. The message never quotes a secret."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    role: Role = "client"
    secrets: tuple[str, ...] = ()
    secrets_sha256: tuple[str, ...] = ()
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    token_budget: Limit | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[_Entry, ...] = ()


def keys_of_file(path: Path) -> tuple[ApiKey, ...]:
    """The keys of the file. Raises WrongKeyFile that names the file and what is wrong with it."""
    try:
        entries = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")) or {}, _File).keys
    except OSError as error:
        raise WrongKeyFile(f"{path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:  # its text would quote the file, and so a secret
        raise WrongKeyFile(f"{path} is not YAML{_line(error)}") from error
    except (ValueError, msgspec.ValidationError) as error:
        raise WrongKeyFile(f"{path}: {error}") from error
    for entry in entries:
        _check(path, entry)
    doubled = [name for name, count in Counter(entry.name for entry in entries).items() if count > 1]
    if doubled:
        raise WrongKeyFile(f"{path} has several keys with the name {doubled[0]}")
    return tuple(_key(entry) for entry in entries)


def _check(path: Path, entry: _Entry) -> None:
    if not NAME.fullmatch(entry.name):
        raise WrongKeyFile(f"{path}: a key's name has 1 to 63 letters, digits, dots, dashes, underscores")
    if not entry.secrets and not entry.secrets_sha256:
        raise WrongKeyFile(f"{path}: the key {entry.name} has no secret")
    if not all(map(is_secret, entry.secrets)):
        raise WrongKeyFile(f"{path}: a secret of the key {entry.name} is empty, or asterisks alone")
    if not all(DIGEST.fullmatch(each) for each in entry.secrets_sha256):
        raise WrongKeyFile(f"{path}: secrets_sha256 of the key {entry.name} are not SHA-256 in hex")


def _key(entry: _Entry) -> ApiKey:
    digests = [*map(digest, entry.secrets), *entry.secrets_sha256]
    limits = KeyLimits(entry.requests_per_minute, entry.tokens_per_minute, entry.token_budget)
    return ApiKey(entry.name, entry.role, tuple(map(Secret, digests)), limits, "file")


def _line(error: yaml.YAMLError) -> str:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return "" if mark is None else f" (line {mark.line + 1})"
