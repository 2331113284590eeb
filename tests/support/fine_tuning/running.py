"""The service for fine-tuning jobs on a real port, with OpenAI's client."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from openai.types.fine_tuning import FineTuningJob

from fine_tuning.app import create_app
from fine_tuning.settings import FineTuningSettings
from tests.support.reward_service.graders import CHECK
from tests.support.serving import serving
from tests.support.waiting import wait_until

ENDED = ("succeeded", "failed", "cancelled")
QUICK: dict[str, Any] = {"poll_every_s": 0.05, "settle_s": 0.1, "group_size": 2}


def sums(count: int, **more: Any) -> list[dict[str, Any]]:
    """Rows that ask for the double of a number."""
    return [
        {"messages": [{"role": "user", "content": f"double of {number}?"}], "answer": str(2 * number), **more}
        for number in range(count)
    ]


def jsonl(rows: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@dataclass
class RunningJobs:
    """The service as its clients see it."""

    url: str
    openai: openai.OpenAI

    def upload(self, rows: Iterable[Any] | bytes) -> str:
        content = rows if isinstance(rows, bytes) else jsonl(rows)
        return self.openai.files.create(file=("rows.jsonl", content), purpose="fine-tune").id

    def start(self, rows: Iterable[Any] | bytes, grader: Any = None, **more: Any) -> FineTuningJob:
        """Make a job; `more` are hyperparameters, and fields of the body in `body`."""
        body = more.pop("body", {})
        method: Any = {
            "type": "reinforcement",
            "reinforcement": {"grader": grader or CHECK, "hyperparameters": more},
        }
        file_id = self.upload(rows)
        return self.openai.fine_tuning.jobs.create(
            model="policy", training_file=file_id, **{"method": method, **body}
        )

    def job(self, job_id: str) -> FineTuningJob:
        return self.openai.fine_tuning.jobs.retrieve(job_id)

    def ended(self, job_id: str, timeout_s: float = 180) -> FineTuningJob:
        wait_until(lambda: self.job(job_id).status in ENDED, timeout_s)
        return self.job(job_id)

    def messages(self, job_id: str) -> list[str]:
        """What happened, the oldest first."""
        events = list(self.openai.fine_tuning.jobs.list_events(job_id, limit=1000))
        return [event.message for event in events][::-1]


@contextmanager
def fine_tuning(directory: Path, gateway_url: str, key: str = "", **settings: Any) -> Iterator[RunningJobs]:
    """A service in this process; without a key it is open."""
    given = {"directory": directory, "gateway_url": gateway_url, "admin_keys": [key] if key else []}
    app = create_app(FineTuningSettings(**QUICK | given | settings))
    with serving(app, loop="asyncio") as url, client_of(url, key or "none") as client:
        yield RunningJobs(url, client)


def client_of(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
