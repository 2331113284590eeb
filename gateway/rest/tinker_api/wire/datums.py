"""Reads the body of forward_backward: protobuf to a command of the log.

Every error names the datum and its field. The tensors are little-endian, as the SDK sends them.
"""

import math
import sys
from array import array
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError

from gateway.errors import InvalidRequest
from gateway.rest.tinker_api.wire import messages_pb2 as wire
from gateway.rest.tinker_api.wire.sparse import is_csr
from rollout_queue.commands.command import ForwardBackward
from rollout_queue.commands.datum import Datum
from rollout_queue.contract.errors import InvalidRecord
from rollout_queue.contract.tokens import Logprobs, TokenIds

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
            raise InvalidRequest("data: there is no datum", param="data")
        _check_size(message)
        data = tuple(_datum(each, at, vocab_size) for at, each in enumerate(message.data))
        if len(counts := {each.k for each in data}) > 1:
            message_text = f"data: targets of {sorted(counts)} for a position; one request has one number"
            raise InvalidRequest(message_text, param="data")
        return ForwardBackward(message.loss_fn, _config(message), data, message.forward_only)


def _check_size(message: wire.ForwardBackwardRequest) -> None:
    """Raises InvalidRequest for more than is read; before anything of it is written out."""
    if len(message.data) > MOST_DATUMS:
        raise InvalidRequest(f"data: {len(message.data)} datums, of {MOST_DATUMS} allowed", param="data")
    values = sum(
        math.prod(max(0, length) for length in tensor.shape)
        for datum in message.data
        for tensor in datum.loss_fn_inputs.values()
    )
    if values > MOST_VALUES:
        raise InvalidRequest(f"data: {values} values, of {MOST_VALUES} allowed", param="data")


def _config(message: wire.ForwardBackwardRequest) -> dict[str, float | str]:
    found: dict[str, float | str] = dict(message.loss_fn_config)
    if message.loss_fn_config_v2:
        found = {
            name: value.text if value.WhichOneof("value") == "text" else value.number
            for name, value in message.loss_fn_config_v2.items()
        }
    for name, value in found.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"loss_fn_config: {name} is {value}", param="loss_fn_config")
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
