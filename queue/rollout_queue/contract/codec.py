"""Records to bytes and back: one schema byte, then MessagePack of the tagged record."""

from typing import Any

import msgspec

from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds, pack
from rollout_queue.contract.records import Record, SessionSpec

SCHEMA = 1
_SCHEMA_BYTE = bytes([SCHEMA])


def decode_packed(kind: type, value: Any) -> Any:
    """msgspec's `dec_hook`: what `pack` has packed."""
    if kind is TokenIds or kind is Logprobs:
        return kind.unpack(value)
    raise NotImplementedError(f"cannot decode {kind.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=pack)
_record_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record, dec_hook=decode_packed)
_spec_decoder = msgspec.msgpack.Decoder(SessionSpec)


def encode(record: Record | SessionSpec) -> bytes:
    return _SCHEMA_BYTE + _encoder.encode(record)


def decode(packed: bytes) -> Record:
    """The record in `packed`. Raises UnknownSchema for a newer schema, InvalidRecord for other bytes."""
    try:
        return _record_decoder.decode(_body(packed))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRecord(f"not a record: {error}") from error


def decode_spec(packed: bytes) -> SessionSpec:
    """The session in `packed`. Raises as `decode`."""
    try:
        return _spec_decoder.decode(_body(packed))
    except msgspec.DecodeError as error:
        raise InvalidRecord(f"not a session: {error}") from error


def _body(packed: bytes) -> memoryview:
    if not packed:
        raise InvalidRecord("an empty entry")
    if packed[0] != SCHEMA:
        raise UnknownSchema(f"record schema {packed[0]}; this build reads schema {SCHEMA}")
    return memoryview(packed)[1:]
