"""How a generation begins, and that it is recorded once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.counters import CallFigures
from gateway.errors import InvalidRequest
from gateway.fleet.event_stream import OutputChunk
from gateway.fleet.fleet import Fleet
from gateway.generations.generation import Call, Generation, Pinned, UnreadCall
from gateway.generations.generator import Generator
from gateway.generations.recorder import Recorder
from gateway.language.render import ChatRenderer
from gateway.policies.canary_watch import CanaryWatch
from gateway.prometheus import Metrics
from gateway.settings import GatewaySettings
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.packed_tokens import TokenIds
from rollout_queue.contract.records import Span
from rollout_queue.contract.serving_plan import Canary, ServingPlan
from tests.support.gateway.families_agent import renderer_of
from tests.support.queue.memory_stream import MemoryStream
from tests.support.queue.records import spec

NOBODY = cast(Any, None)
CANARY = Canary(
    id=1, version=1, baseline=0, servers=("r",), share=0.5, state="open", started_at=0.0, opened_at=0.0
)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return renderer_of(tmp_path_factory.mktemp("generations"), "kimi-k2")


@dataclass
class Gateway:
    """The parts of a gateway that make generations. A canary is open."""

    generator: Generator
    recorder: Recorder
    metrics: Metrics
    head: SessionHead

    async def begin(self, version: int | None = None, prompt: tuple[int, ...] = (5,)) -> Generation:
        call, client = Call([], prompt_ids=TokenIds(prompt)), UnreadCall("", 0, 0, CallFigures("chat"))
        (begun,) = await self.generator.begin(self.head, [call], 1, Pinned(version), "", False, client)
        return begun


@pytest.fixture
async def gateway(renderer: ChatRenderer, tmp_path: Path) -> Gateway:
    settings, metrics, stream = GatewaySettings(model_path=tmp_path), Metrics(), MemoryStream()
    fleet = Fleet(NOBODY, NOBODY, None)
    fleet.adopt(ServingPlan(canary=CANARY))
    canary = CanaryWatch(NOBODY, fleet)
    recorder = Recorder(settings, renderer, stream, metrics, canary)
    opened, _ = await stream.open_session(spec())
    generator = Generator(settings, renderer, NOBODY, recorder, canary, lambda: None)
    return Gateway(generator, recorder, metrics, SessionHead(spec=opened))


async def test_a_call_that_names_a_version_has_no_part_in_the_canary(gateway: Gateway) -> None:
    named, other = await gateway.begin(0), await gateway.begin()
    assert (named.trial, named.allowed.version) == (None, 0)
    assert other.trial is not None
    assert other.trial.canary == CANARY


@pytest.mark.parametrize("outside", [-1, 2**30])
async def test_a_prompt_with_an_id_outside_the_vocabulary_is_refused(gateway: Gateway, outside: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await gateway.begin(prompt=(5, outside))
    assert refused.value.code == "token_out_of_vocabulary"


async def test_an_answer_that_is_recorded_is_not_recorded_again_as_aborted(gateway: Gateway) -> None:
    generation = await gateway.begin()
    generation.take(OutputChunk(ids=[7], logprobs=[-0.5], finish="stop", versions=(Span(0, 0, 1),)))
    await gateway.recorder.record(generation)
    await gateway.recorder.record_unrecorded([generation])
    assert gateway.metrics.traffic.turns == 1
