"""Damaged bodies of forward_backward: each is refused or promised, and none ends the gateway."""

import random
from array import array

import pytest
import zstandard

from gateway.rest.tinker_api.wire import messages_pb2 as wire
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.gateway.scripted_trainer import scripted_trainer
from tests.support.gateway.tinker_loop import TinkerLoop, datum, tensor

BODIES = 60


def sound(loop: TinkerLoop, number: int, draw: random.Random) -> bytes:
    """The body of a command that the gateway takes."""
    length = draw.randint(1, 9)
    ids = [draw.randrange(1000) for _ in range(length)]
    made = datum(ids, ids, weights=[draw.uniform(-2, 2) for _ in ids])
    made.loss_fn_inputs["advantages"].CopyFrom(tensor(array("f", [1.0] * length), [length]))
    request = wire.ForwardBackwardRequest(
        model_id=loop.model_id, seq_id=number, data=[made, made], loss_fn="ppo", loss_fn_config={"a": 1.0}
    )
    body: bytes = request.SerializeToString()
    return body


def damaged(body: bytes, draw: random.Random) -> bytes:
    """The body with some bytes changed, cut out, doubled or cut off."""
    data = bytearray(body)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[at] = draw.randrange(256)
            case 1:
                del data[at : at + draw.randint(1, 8)]
            case 2:
                data[at:at] = data[at : at + draw.randint(1, 30)]
            case _:
                del data[at + 1 :]
    return bytes(data)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bodies_are_refused_or_promised(
    gateway: RunningGateway, backends: Backends, seed: int
) -> None:
    loop, draw = TinkerLoop(gateway, str(backends.model_path)), random.Random(seed)
    loop.begin()
    with scripted_trainer(gateway.redis):
        for number in range(1, BODIES):
            reply = loop.send(damaged(sound(loop, number, draw), draw))
            assert reply.status_code in (200, 400, 404), reply.text
            if reply.status_code == 200:
                assert set(reply.json()) == {"request_id", "model_id"}
    assert gateway.get("/live").status_code == 200


def test_what_a_compressed_body_becomes_counts_as_much_as_a_body(backends: Backends) -> None:
    backends.clear(None)
    with backends.gateway(max_bodies_bytes_per_key=50_000) as gateway:
        loop = TinkerLoop(gateway, str(backends.model_path))
        loop.begin()
        for size, status in ((100_000, 413), (40_000, 400), (100_000, 413), (40_000, 400)):
            answer = loop.send(zstandard.compress(bytes(size)), **{"content-encoding": "zstd"})
            assert answer.status_code == status, answer.text
