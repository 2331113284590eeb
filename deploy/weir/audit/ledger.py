"""The trainer's ledger: from the trainer itself, or from its checkpoints where it does not run.

{directory}/CURRENT ─▶ {directory}/{tag}/state.json ─▶ `ledger_bytes` of {directory}/ledger.jsonl

What lies beyond those bytes was written for a checkpoint that was never finished: it is not durable. The
files are read here by their documented layout and not by the trainer's code, which is what is being audited.
"""

from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec

from weir.audit.facts import Ledger, LedgerRow
from weir.errors import StackError

PAGE = 1000
TIMEOUT_S = 30.0


class EvidenceMissing(StackError):
    """Something that the audit has to see cannot be read, so nothing can be said."""


class _Page(msgspec.Struct, frozen=True):
    data: list[LedgerRow]
    next_cursor: str | None


class _State(msgspec.Struct, frozen=True):
    ledger_bytes: int


def read_ledger(trainer_url: str | None, admin_key: str | None, directory: Path | None) -> Ledger:
    """Every durable row. Raises EvidenceMissing when neither the trainer nor its directory has them."""
    absence = "no trainer is named"
    if trainer_url is not None:
        try:
            return Ledger(tuple(_served(trainer_url, admin_key)), f"{trainer_url}/ledger")
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            absence = f"the trainer at {trainer_url} does not show its ledger: {error}"
    if directory is None or not directory.is_dir():
        where = "" if directory is None else f", and {directory} is no directory of checkpoints"
        raise EvidenceMissing(f"{absence}{where}")
    return Ledger(tuple(_filed(directory)), str(directory), f"{absence}; the ledger was read from files")


def _served(url: str, admin_key: str | None) -> Iterator[LedgerRow]:
    headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:
        # Before it has restored its checkpoint, a trainer serves an empty ledger.
        client.get("/ready").raise_for_status()
        cursor: str | None = "0"
        while cursor is not None:
            answer = client.get("/ledger", params={"since": cursor, "limit": PAGE}).raise_for_status()
            page = msgspec.json.decode(answer.content, type=_Page)
            yield from page.data
            cursor = page.next_cursor


def _filed(directory: Path) -> Iterator[LedgerRow]:
    try:
        current = directory / "CURRENT"
        if not current.exists():  # no checkpoint was ever finished
            return
        tag = current.read_text(encoding="utf-8").strip()
        state = msgspec.json.decode((directory / tag / "state.json").read_bytes(), type=_State)
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
