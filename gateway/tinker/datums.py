"""Reads the body of forward_backward: protobuf to a command of the log.

Every error names the datum and its field. The tensors are little-endian, as the SDK sends them.

Checks the indices of sparse tensors (CSR: compressed rows).

Token ids whose log-probabilities a client wants in the places of its prompt: `target_prompt_logprobs`.

Row i is about position i + 1, because nothing comes before the first token. A cell of -1 wants nothing.

Writes a sample as the SDK reads it.
"""

import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import msgspec
from google.protobuf.message import DecodeError
from pydantic import Field, model_validator

from gateway.errors import InvalidRequest, invalid
from gateway.fleet.scoring import PromptQuery, PromptScores
from gateway.generations.generation import Generation
from gateway.rest.bodies import RestBody
from gateway.tinker import messages_pb2 as wire
from rollout_queue.contract.errors import InvalidRecord
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.trainer_commands import Datum, ForwardBackward


def is_csr(begins: Sequence[float], columns: Sequence[float], listed: int, shape: tuple[int, int]) -> bool:
    """Whether `begins` (of each row, and the end) and `columns` describe `listed` values of a matrix."""
    return (
        len(begins) == shape[0] + 1
        and begins[0] == 0
        and begins[-1] == listed == len(columns)
        and all(one <= other for one, other in pairwise(begins))
        and all(0 <= column < shape[1] for column in columns)
    )


if sys.byteorder == "big":
    raise ImportError("the Tinker API needs a little-endian processor")
TARGETS = "target_tokens"
MOST_TARGETS = 4096
"""The most soft targets of one position."""
MOST_DATUMS = 4096
"""The most datums of one request; the SDK sends 1,024."""
MOST_VALUES = 2**24
"""The most values of all tensors of one request, when sparse ones are written out."""


class ReadPass:
    """The body of one forward_backward: whose command it is, and its number."""

    def __init__(self, body: bytes) -> None:
        """Raises InvalidRequest for bytes that are no such message."""
        self._message = wire.ForwardBackwardRequest()
        try:
            self._message.ParseFromString(body)
        except DecodeError as error:
            raise InvalidRequest(f"the body is no protobuf message of forward_backward: {error}") from error
        self.model_id: str = self._message.model_id
        self.number: int = self._message.seq_id
        if not self.model_id or self.number < 0:
            raise InvalidRequest("forward_backward needs a model_id, and a seq_id that is not negative")

    def command(self, vocab_size: int) -> ForwardBackward:
        """Raises InvalidRequest for data that contradict themselves."""
        message = self._message
        if not message.data:
            raise invalid("data", "there is no datum")
        _check_size(message)
        data = tuple(_datum(each, at, vocab_size) for at, each in enumerate(message.data))
        if len(counts := {each.k for each in data}) > 1:
            raise invalid("data", f"targets of {sorted(counts)} for a position; one request has one number")
        return ForwardBackward(message.loss_fn, _config(message), data, message.forward_only)


def _check_size(message: wire.ForwardBackwardRequest) -> None:
    """Raises InvalidRequest for more than is read; before anything of it is written out."""
    if len(message.data) > MOST_DATUMS:
        raise invalid("data", f"{len(message.data)} datums, of {MOST_DATUMS} allowed")
    values = sum(
        math.prod(max(0, length) for length in tensor.shape)
        for datum in message.data
        for tensor in datum.loss_fn_inputs.values()
    )
    if values > MOST_VALUES:
        raise invalid("data", f"{values} values, of {MOST_VALUES} allowed")


def _config(message: wire.ForwardBackwardRequest) -> dict[str, float | str]:
    found: dict[str, float | str] = dict(message.loss_fn_config)
    if message.loss_fn_config_v2:
        found = {
            name: value.text if value.WhichOneof("value") == "text" else value.number
            for name, value in message.loss_fn_config_v2.items()
        }
    for name, value in found.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid("loss_fn_config", f"{name} is {value}")
    return found


def _datum(datum: wire.Datum, at: int, vocab_size: int) -> Datum:
    where = f"data[{at}]"
    packed = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise InvalidRequest(f"{where}.model_input: chunks of kind {kind} are not served", param="data")
        packed.append(chunk.encoded_text.tokens)
    tokens = _ids(b"".join(packed), f"{where}.model_input", vocab_size)
    tensors: Mapping[str, wire.Tensor] = datum.loss_fn_inputs
    if TARGETS not in tensors:
        raise InvalidRequest(f"{where}.loss_fn_inputs: {TARGETS} is missing", param="data")
    shape = _shape(tensors[TARGETS], len(tokens), f"{where}.{TARGETS}")
    values = _values(tensors[TARGETS], shape, f"{where}.{TARGETS}")
    if values.typecode == "f":
        raise InvalidRequest(f"{where}.{TARGETS}: token ids are whole numbers", param="data")
    if min(values, default=0) < 0 or max(values, default=0) >= vocab_size:
        raise _outside(f"{where}.{TARGETS}", vocab_size)
    numbers = {
        name: Logprobs(_values(tensor, shape, f"{where}.{name}"))
        for name, tensor in sorted(tensors.items())
        if name != TARGETS
    }
    try:
        return Datum(tokens, TokenIds(values), shape[1], numbers)
    except InvalidRecord as error:
        raise InvalidRequest(f"{where}: {error}", param="data") from error


def _ids(packed: bytes, where: str, vocab_size: int) -> TokenIds:
    try:
        ids = TokenIds.unpack(packed)
    except ValueError as error:
        raise InvalidRequest(f"{where}: {error}", param="data") from error
    if not ids:
        raise InvalidRequest(f"{where}: there is no token", param="data")
    if not ids.natural or max(ids) >= vocab_size:
        raise _outside(where, vocab_size)
    return ids


def _outside(where: str, vocab_size: int) -> InvalidRequest:
    message = f"{where}: a token id lies outside the vocabulary of {vocab_size}"
    return InvalidRequest(message, param="data", code="token_out_of_vocabulary")


def _shape(tensor: wire.Tensor, tokens: int, where: str) -> tuple[int, int]:
    """[N, K] of a tensor that has a row, or a value, for each token. A tensor without a shape is flat."""
    shape = list(tensor.shape) or [tokens]
    k = shape[1] if len(shape) == 2 else 1
    if len(shape) > 2 or shape[0] != tokens or not 1 <= k <= MOST_TARGETS:
        raise InvalidRequest(f"{where}: shape {shape[:4]} for {tokens} tokens", param="data")
    return tokens, k


def _values(tensor: wire.Tensor, shape: tuple[int, int], where: str) -> "array[Any]":
    """The N * K values of a tensor. A value that a sparse tensor does not list is 0."""
    if _shape(tensor, shape[0], where) != shape:
        message = f"{where}: shape {list(tensor.shape)[:4]}, and targets of shape {list(shape)}"
        raise InvalidRequest(message, param="data")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        return _dense(tensor, shape, where)
    values = _array(tensor.dense, tensor.dtype, where)
    if len(values) != shape[0] * shape[1]:
        raise InvalidRequest(f"{where}: {len(values)} values for shape {list(shape)}", param="data")
    return values


def _array(packed: bytes, dtype: int, where: str) -> "array[Any]":
    try:
        match dtype:
            case wire.DTYPE_FLOAT32:
                return array("f", packed)
            case wire.DTYPE_INT64:
                return array("q", packed)
            case wire.DTYPE_INT32:
                return array("i", packed)
            case wire.DTYPE_BFLOAT16:
                return array("f", b"".join(b"\0\0" + packed[at : at + 2] for at in range(0, len(packed), 2)))
    except ValueError as error:
        raise InvalidRequest(f"{where}: {error}", param="data") from error
    raise InvalidRequest(f"{where}: dtype {dtype} is not known", param="data")


def _dense(tensor: wire.Tensor, shape: tuple[int, int], where: str) -> "array[Any]":
    csr = tensor.sparse_csr
    listed = _array(csr.values, tensor.dtype, where)
    begins = _array(csr.crow_indices, wire.DTYPE_INT64, where)
    columns = _array(csr.col_indices, wire.DTYPE_INT64, where)
    if not is_csr(begins, columns, len(listed), shape):
        raise InvalidRequest(f"{where}: the indices of the sparse tensor contradict its shape", param="data")
    values = array(listed.typecode, bytes(listed.itemsize * shape[0] * shape[1]))
    for row in range(shape[0]):
        for at in range(begins[row], begins[row + 1]):
            values[row * shape[1] + columns[at]] = listed[at]
    return values


FIELD = "target_prompt_logprobs"
NOTHING = -1
"""What stands in a cell that wants nothing."""
MOST_SCORES = 2**19
"""The engine scores each wanted id in every place from the first row on. So many scores are read, and so many
cells are answered."""
TOKEN_LIMIT = 2**31
Indices = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


class TargetsBody(RestBody):
    """An int64 tensor as the SDK sends it: dense, or CSR with both lists of indices."""

    data: Annotated[list[Annotated[int, Field(ge=NOTHING, lt=TOKEN_LIMIT)]], Field(fail_fast=True)]
    dtype: Literal["int64"]
    shape: Indices | None = None
    sparse_crow_indices: Indices | None = None
    sparse_col_indices: Indices | None = None

    @model_validator(mode="after")
    def _has_a_layout(self) -> Self:
        if (self.sparse_crow_indices is None) != (self.sparse_col_indices is None):
            raise ValueError("sparse_crow_indices and sparse_col_indices come together")
        if self.shape is None or len(self.shape) != 2 or self.shape[1] < 1:
            raise ValueError("its shape is [len(prompt) - 1, K]")
        return self


class PromptTargets(msgspec.Struct, frozen=True):
    """The wanted ids of a prompt, in the layout in which they were asked."""

    ids: Sequence[int]
    shape: Sequence[int]
    rows: Sequence[int] | None = None
    """Where each row begins in `ids`, and the end, of a sparse tensor; None: it is dense."""
    columns: Sequence[int] = ()

    @property
    def candidates(self) -> tuple[int, ...]:
        """The wanted ids, each once."""
        return tuple(sorted(set(self.ids) - {NOTHING}))

    @property
    def start(self) -> int:
        """The first position for which an id is wanted."""
        return next(position for position, token in self._cells() if token != NOTHING)

    def scored(self, candidates: Sequence[Sequence[float]]) -> wire.Tensor:
        """The tensor of the answer: shape and layout of the question, 0 where nothing is wanted.

        `candidates`: by position, the log-probability of each of `self.candidates`.
        """
        column = {token: at for at, token in enumerate(self.candidates)}
        values = array(
            "f",
            (
                0.0 if token == NOTHING else candidates[position][column[token]]
                for position, token in self._cells()
            ),
        ).tobytes()
        tensor = wire.Tensor(dtype=wire.DTYPE_FLOAT32, shape=self.shape)
        if self.rows is None:
            tensor.dense = values
        else:
            tensor.sparse_csr.values = values
            tensor.sparse_csr.crow_indices = array("q", self.rows).tobytes()
            tensor.sparse_csr.col_indices = array("q", self.columns).tobytes()
        return tensor

    def _cells(self) -> Iterator[tuple[int, int]]:
        """The position and the id of each cell that is listed."""
        rows = self.rows or range(0, len(self.ids) + 1, self.shape[1])
        for position, (begin, end) in enumerate(pairwise(rows), 1):
            for at in range(begin, end):
                yield position, self.ids[at]


def prompt_targets(body: TargetsBody, length: int, vocab_size: int) -> PromptTargets:
    """The targets of a prompt of `length` tokens. Raises InvalidRequest for what cannot be scored."""
    count, k = body.shape or (0, 0)
    rows, columns = body.sparse_crow_indices, body.sparse_col_indices or []
    if count != length - 1:
        raise _refused(f"{count} rows, for a prompt of {length} tokens; there must be {length - 1}")
    if len(body.data) > MOST_SCORES:
        raise _refused(f"{len(body.data)} cells, of {MOST_SCORES} allowed: name ids in fewer places at once")
    if rows is None and len(body.data) != count * k:
        raise _refused(f"{len(body.data)} ids, for the shape {[count, k]}")
    if rows is not None and not is_csr(rows, columns, len(body.data), (count, k)):
        raise _refused("the indices of the sparse tensor contradict its shape")
    if max(body.data, default=NOTHING) >= vocab_size:
        raise _refused(f"an id lies outside the vocabulary of {vocab_size}")
    targets = PromptTargets(body.data, (count, k), rows, columns)
    if not targets.candidates:
        raise _refused("no id is wanted")
    scores = (length - targets.start) * len(targets.candidates)
    if scores > MOST_SCORES:
        message = f"{len(targets.candidates)} different ids in {length - targets.start} places are {scores}"
        raise _refused(f"{message} scores, of {MOST_SCORES} allowed: ask for fewer ids at once")
    return targets


def _refused(message: str) -> InvalidRequest:
    return invalid(FIELD, message)


NO_LOGPROB = -99999.0
"""What stands in an empty cell of the likeliest tokens."""
Top = Sequence[Sequence[tuple[float, int]]]


class WantedScores(msgspec.Struct, frozen=True):
    """What a client wants to know of its prompt."""

    logprobs_from: int | None = None
    """The position of the first token whose log-probability is wanted; None: of none."""
    top: int = 0
    """How many likeliest tokens in the place of each of these."""
    targets: PromptTargets | None = None

    @property
    def query(self) -> PromptQuery | None:
        """What the engine is asked; None: nothing."""
        starts = [self.logprobs_from, None if self.targets is None else self.targets.start]
        known = [start for start in starts if start is not None]
        candidates = () if self.targets is None else self.targets.candidates
        return PromptQuery(min(known), self.top, candidates) if known else None

    def write(self, scores: PromptScores, response: wire.SampleResponse) -> None:
        """Add the engine's scores to the answer."""
        if self.logprobs_from is not None:
            wanted = [None if at < self.logprobs_from else each for at, each in enumerate(scores.logprobs)]
            values = (float("nan") if each is None else each for each in wanted)
            response.prompt_logprobs = array("f", values).tobytes()
            if self.top:
                top = [() if each is None else found for each, found in zip(wanted, scores.top, strict=True)]
                response.topk_prompt_logprobs.CopyFrom(_top(top, self.top))
        if self.targets is not None:
            response.target_prompt_logprobs.CopyFrom(self.targets.scored(scores.candidates))


def sample_response(
    generations: Sequence[Generation], top_k: int, wanted: WantedScores, scores: PromptScores | None
) -> bytes:
    """The message SampleResponse. `top_k`: how many likeliest tokens of each sampled one were asked for."""
    response = wire.SampleResponse(prompt_cache_hit_tokens=generations[0].cached_tokens)
    for generation in generations:
        response.sequences.append(_sequence(generation, top_k))
    if scores is not None:
        wanted.write(scores, response)
    encoded: bytes = response.SerializeToString()
    return encoded


def _sequence(generation: Generation, top_k: int) -> wire.SampledSequence:
    length = generation.finish == "length"
    sequence = wire.SampledSequence(
        stop_reason=wire.STOP_REASON_LENGTH if length else wire.STOP_REASON_STOP,
        tokens=array("i", generation.ids).tobytes(),
        logprobs=array("f", generation.logprobs).tobytes(),
    )
    if top_k:
        sequence.topk_sampled_logprobs.CopyFrom(_top(generation.top_logprobs, top_k))
    return sequence


def _top(top: Top, k: int) -> wire.TopkLogprobs:
    ids, logprobs = array("i"), array("f")
    for each in top:
        cells = [*each[:k], *[(NO_LOGPROB, 0)] * (k - len(each[:k]))]
        ids.extend(token for _, token in cells)
        logprobs.extend(logprob for logprob, _ in cells)
    return wire.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(top))
