"""Commands, their data and their answers are checked when they are made, and survive their bytes."""

import pytest

from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.trainer_commands import (
    Answer,
    Command,
    CreateModel,
    Datum,
    ForwardBackward,
    OptimStep,
    Passed,
    Refused,
    Result,
    Stepped,
    decode_answer,
    decode_command,
    encode,
)

STEP = OptimStep(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)
DATUM = Datum(TokenIds([1, 2]), TokenIds([2, 3]), 1, {"weights": Logprobs([1.0, 1.0])})


def test_records_survive_their_bytes() -> None:
    passes = ForwardBackward("cross_entropy", {}, (DATUM,))
    commands: list[Command] = [passes, STEP, CreateModel("b", None), Refused("no")]
    for command in commands:
        assert decode_command(encode(command)) == command
    results: list[Result] = [Stepped({"grad_norm": 1.0}), Passed((Logprobs([-1.0]),), 1, {"loss:sum": 1.0})]
    for result in results:
        assert decode_answer(encode(Answer(result))) == Answer(result)
    for packed, error in ((b"", InvalidRecord), (b"\x02", UnknownSchema), (b"\x01\xc1", InvalidRecord)):
        with pytest.raises(error):
            decode_command(packed)
        with pytest.raises(error):
            decode_answer(packed)


def test_a_datum_that_contradicts_itself_is_refused() -> None:
    ids = TokenIds([1, 2])
    for arguments in (
        (ids, TokenIds([1])),
        (TokenIds(), TokenIds()),
        (ids, ids, 2),
        (ids, ids, 1, {"weights": Logprobs([1.0])}),
        (ids, ids, 1, {"weights": Logprobs([1.0, float("nan")])}),
        (ids, ids, 0),
    ):
        with pytest.raises(InvalidRecord):
            Datum(*arguments)
    assert len(Datum(ids, TokenIds([1, 2, 3, 4]), 2, {"weights": Logprobs([1.0] * 4)})) == 2
