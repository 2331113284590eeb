"""Reads the trainer's ledger from the trainer, or from the checkpoints if the trainer does not answer.

{directory}/CURRENT ─▶ {directory}/{tag}/state.json ─▶ the first `ledger_bytes` of {directory}/ledger.jsonl

Bytes after `ledger_bytes` belong to a checkpoint that was not finished, so they are not durable. The audit
checks the trainer's code, so it does not use that code to read the files.
"""

from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec

from rollout_queue.foreign_json import read_json
from rollout_queue.http.keys import bearer
from weir.audit.facts import Ledger, LedgerRow
from weir.errors import StackError

PAGE = 1000
TIMEOUT_S = 30.0


class EvidenceMissing(StackError):
    """A part of the evidence cannot be read, so the audit has no result."""


class _LedgerPage(msgspec.Struct, frozen=True):
    data: list[LedgerRow]
    next_cursor: str | None


class _CheckpointState(msgspec.Struct, frozen=True):
    ledger_bytes: int


def read_ledger(trainer_url: str | None, admin_key: str | None, directory: Path | None) -> Ledger:
    """Every durable row. Raises EvidenceMissing when neither the trainer nor `directory` has them."""
    absence = "no trainer is given"
    if trainer_url is not None:
        try:
            return Ledger(tuple(_served(trainer_url, admin_key)), f"{trainer_url}/ledger")
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            absence = f"the trainer at {trainer_url} does not return its ledger: {error}"
    if directory is None or not directory.is_dir():
        where = "" if directory is None else f", and {directory} is not a directory of checkpoints"
        raise EvidenceMissing(f"{absence}{where}")
    return Ledger(
        tuple(_filed(directory)), str(directory), f"{absence}; the ledger was read from its checkpoints"
    )


def _served(url: str, admin_key: str | None) -> Iterator[LedgerRow]:
    headers = bearer(admin_key)
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:
        # Until it has restored its checkpoint, a trainer returns an empty ledger.
        client.get("/ready").raise_for_status()
        cursor: str | None = "0"
        while cursor is not None:
            answer = client.get("/ledger", params={"since": cursor, "limit": PAGE}).raise_for_status()
            page = read_json(answer.content, _LedgerPage)
            yield from page.data
            cursor = page.next_cursor


def _filed(directory: Path) -> Iterator[LedgerRow]:
    try:
        current = directory / "CURRENT"
        if not current.exists():  # no checkpoint was finished yet
            return
        tag = current.read_text(encoding="utf-8").strip()
        state = msgspec.json.decode((directory / tag / "state.json").read_bytes(), type=_CheckpointState)
        with (directory / "ledger.jsonl").open("rb") as file:
            left = state.ledger_bytes
            while left > 0:
                line = file.readline()
                left -= len(line)
                if left < 0 or not line:
                    raise EvidenceMissing(f"{file.name} is shorter than checkpoint {tag} says")
                yield msgspec.json.decode(line, type=LedgerRow)
    except (OSError, msgspec.DecodeError) as error:
        raise EvidenceMissing(f"the ledger in {directory} cannot be read: {error}") from error
