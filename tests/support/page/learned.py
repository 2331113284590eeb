"""What the data views show: sessions with trees of turns and verdicts, a trained group, and a run."""

import hashlib
import json
import math
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from rollout_queue.contract.codec import decode, encode
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds, TrainedTokens
from rollout_queue.contract.published_policy import TrainedStep
from rollout_queue.contract.records import Span, Turn, TurnImage, Verdict
from rollout_queue.http.callers import Keyring
from rollout_queue.http.http_server import HttpThread
from rollout_queue.redis import key_names
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY
from tests.support.images import encoded, image_of
from tests.support.page.deployment import ShownDeployment
from tests.support.page.run_metrics import metrics_of
from tests.support.serving import free_port

QUESTION = "A train leaves at 14:05 and arrives at 16:50. How long does it travel?\nAnswer in minutes."
ANSWER = "From 14:05 to 16:05 are 120 minutes, and 45 more make 165. Naïve 🦦 answer: **165**"
HOSTILE = "<img src=x onerror=alert(1)>\u202egnp.exe\u202c zero\u200bwidth \x1b[31mred\r\n</script>{{7*7}}"
GROUP, SESSION, TALK = "train-times", "train-times-0", "talk-of-the-weather-in-ulm"


def put_turn(shown: ShownDeployment, session_id: str, turn_id: str, text: str, **fields: Any) -> Turn:
    """Store a turn as a gateway does, with tokens of the texts."""
    tokenizer = shown.gateway.engine.tokenizer
    context = tokenizer.encode(fields.pop("context", QUESTION), add_special_tokens=False).ids
    output = tokenizer.encode(text, add_special_tokens=False).ids
    logprobs = [-0.002 - 3.2 * (0.5 + 0.5 * math.sin(2.4 * at)) ** 6 for at in range(len(output))]
    now = time.time()
    given: dict[str, Any] = {
        "context_ids": TokenIds(context),
        "output_ids": TokenIds(output),
        "logprobs": Logprobs(logprobs),
        "versions": (Span(11, 0, len(output) // 2), Span(12, len(output) // 2, len(output))),
        "finish": "stop",
        "started_at": now,
        "finished_at": now,
    }
    turn = Turn(turn_id=turn_id, session_id=session_id, **given | fields)
    shown.gateway.redis.hset(key_names.session(session_id), f"t:{turn_id}", encode(turn))
    return turn


def put_conversation(shown: ShownDeployment) -> None:
    """A session with all that a conversation has: a system's message, a thought, a call, its result."""
    shown.gateway.session(session_id=TALK, task_id="talk")
    start, stop = "<|im_start|>", "<|im_end|>"
    asked = (
        f"{start}system\nBe brief.{stop}\n{start}user\nHow hot is it?\n{HOSTILE}{stop}\n{start}assistant\n"
    )
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    png = encoded(image_of(96, 64))
    image = TurnImage(hashlib.sha256(png).hexdigest(), start=40, end=46, width=96, height=64, grid=(1, 4, 6))
    shown.gateway.redis.set(key_names.image(image.sha256), png)
    thought = f"<think>\nI look.\n</think>\n\n{call}{stop}"
    first = put_turn(shown, TALK, "talk-a", thought, context=asked, images=(image,))
    seen = (
        f"\n{start}user\n<tool_response>\n{'31 degrees. ' * 400}\n</tool_response>{stop}\n{start}assistant\n"
    )
    more = {"parent_id": first.turn_id, "relation": "extends", "context": seen}
    put_turn(shown, TALK, "talk-b", f"It is 31 °C in Ulm.{stop}", **more)


def end(shown: ShownDeployment, session_id: str, reward: float, verdict: Verdict) -> None:
    path = f"/sessions/{session_id}/finish"
    assert shown.gateway.post(path, {"status": "completed", "reward": reward}).status_code == 200
    shown.gateway.redis.hset(key_names.session(session_id), "verdict", msgspec.json.encode(verdict))


def keep_step(shown: ShownDeployment, trained: Verdict) -> None:
    """Note the step that made the version of the verdict."""
    assert trained.step is not None
    assert trained.version is not None
    step = TrainedStep(trained.step, trained.version, trained.version - 1, turns=12, sessions=4, tokens=284)
    shown.gateway.redis.zadd(key_names.STEPS, {msgspec.json.encode(step): trained.version})
    shown.publish(trained.version, force=True)


def note_trained(
    shown: ShownDeployment, session_id: str, turn_id: str, advantage: float, trained: Verdict
) -> None:
    """Store what the trainer stores of a turn that it has trained."""
    redis, key = shown.gateway.redis, key_names.session(session_id)
    stored: Any = redis.hget(key, f"t:{turn_id}")
    turn = decode(stored)
    assert isinstance(turn, Turn)
    count = len(turn.output_ids)
    advantages = struct.pack(f"<{count}f", *(advantage if at % 9 else 0.0 for at in range(count)))
    ratios = struct.pack(f"<{count}e", *(1 + 0.6 * math.sin(1.3 * at) for at in range(count)))
    numbers = TrainedTokens(count, advantages, ratios).pack()
    redis.hset(key, mapping={f"v:{turn_id}": msgspec.json.encode(trained), f"n:{turn_id}": numbers})
    redis.zadd(key_names.TRAINED, {session_id: trained.version or 0})


def fill_sessions(shown: ShownDeployment) -> None:
    """A trained group, one without advantage, one with hostile texts, and a session with a tree of turns."""
    trained = Verdict(code="trained", step=96, version=12)
    keep_step(shown, trained)
    for number, reward in enumerate((1.0, 0.0, 1.0, 0.5)):
        given = {"group_id": GROUP, "group_size": 4, "task_id": "train-times", "user": "ada"}
        name = f"{GROUP}-{number}"
        shown.gateway.session(session_id=name, metadata={"suite": "clock", "note": HOSTILE}, **given)
        first = put_turn(shown, name, f"{name}-a", ANSWER)
        more = {"parent_id": first.turn_id, "relation": "extends", "context": "Are you sure?"}
        put_turn(shown, name, f"{name}-b", "Yes: 165 minutes.", **more)
        forked = {"relation": "forks", "reason": "history_edited", "context": QUESTION + " Briefly."}
        put_turn(shown, name, f"{name}-c", "165", parent_id=None, **forked)
        put_turn(
            shown, name, f"{name}-d", "16", parent_id=None, finish="abort", relation="retry", reason="retried"
        )
        end(shown, name, reward, trained)
        for letter in "abc":
            note_trained(shown, name, f"{name}-{letter}", reward - 0.625, trained)
    for number in range(2):
        name = f"equal-{number}"
        shown.gateway.session(session_id=name, group_id="equal", group_size=2, task_id="equal")
        put_turn(shown, name, f"{name}-a", ANSWER)
        detail = "no rollout of the group has an advantage"
        end(shown, name, 0.25, Verdict(code="zero_advantage", detail=detail))
    put_conversation(shown)
    shown.gateway.session(session_id="hostile", task_id="hostile")
    put_turn(shown, "hostile", "hostile-a", HOSTILE, context=HOSTILE, side_call=HOSTILE, lineage=HOSTILE)
    shown.gateway.session(session_id="open", task_id="nim-12")


@contextmanager
def trainer_with_curves(shown: ShownDeployment, folder: Path, steps: int = 3000) -> Iterator[Path]:
    """A trainer's API with the file of a run of so many steps."""
    # Imported here, because they import torch, which the other views do not need.
    from trainer_service.app import create_app
    from trainer_service.curves import Curves, limits_of
    from trainer_service.groups.guards import Recovery, RecoveryState
    from trainer_service.settings import GuardSettings
    from trainer_service.shared_state import SharedState
    from trainer_service.storage.policy_store import PolicyStore

    path, port = folder / "metrics.jsonl", free_port()
    path.write_text(
        "".join(f"{json.dumps(metrics_of(step))}\n" for step in range(1, steps + 1)), encoding="utf-8"
    )
    older = folder / "older" / "metrics.jsonl"
    older.parent.mkdir()
    lines = (json.dumps(metrics_of(step, lift=-0.1)) for step in range(1, 401))
    older.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    store, keyring = PolicyStore(folder / "policies", folder, keep=4), Keyring([CLIENT_KEY], [ADMIN_KEY])
    curves = Curves(path, limits_of(GuardSettings()))
    state, reason = SharedState(), f"the mean reward of task {HOSTILE} is 0.1"
    state.recovery = RecoveryState(done=[Recovery(1600, 1400, 1500, reason, automatic=True, at=time.time())])
    app = create_app(state, lambda *_: [], store, keyring, CollectorRegistry(), curves=curves)
    with HttpThread(app, "127.0.0.1", port):
        # The report lies in the future, so that the trainer is not silent however long a test takes.
        shown.report(url=f"http://127.0.0.1:{port}", last_seen=time.time() + 3600)
        yield path
