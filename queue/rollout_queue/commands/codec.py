"""Commands and their results to bytes and back: one schema byte, then MessagePack."""

import msgspec

from rollout_queue.commands.command import Command
from rollout_queue.commands.result import Answer, Kept
from rollout_queue.contract.codec import decode_packed, encode_packed
from rollout_queue.contract.errors import InvalidRecord, UnknownSchema

SCHEMA = 1
_SCHEMA_BYTE = bytes([SCHEMA])


# Equal commands have equal bytes, whatever the order of their dictionaries.
_encoder = msgspec.msgpack.Encoder(enc_hook=encode_packed, order="deterministic")
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command, dec_hook=decode_packed)
_answer_decoder = msgspec.msgpack.Decoder(Answer, dec_hook=decode_packed)
_kept_decoder = msgspec.msgpack.Decoder(Kept)


def encode(record: Command | Answer | Kept) -> bytes:
    return _SCHEMA_BYTE + _encoder.encode(record)


def decode_command(packed: bytes) -> Command:
    """Raises UnknownSchema for a newer schema, InvalidRecord for other bytes."""
    try:
        return _command_decoder.decode(_body(packed))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRecord(f"not a command: {error}") from error


def decode_answer(packed: bytes) -> Answer:
    """Raises UnknownSchema for a newer schema, InvalidRecord for other bytes."""
    try:
        return _answer_decoder.decode(_body(packed))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRecord(f"not an answer: {error}") from error


def decode_kept(packed: bytes) -> Kept:
    """Raises UnknownSchema for a newer schema, InvalidRecord for other bytes."""
    try:
        return _kept_decoder.decode(_body(packed))
    except msgspec.DecodeError as error:
        raise InvalidRecord(f"not what a command has made: {error}") from error


def _body(packed: bytes) -> memoryview:
    if not packed:
        raise InvalidRecord("an empty record")
    if packed[0] != SCHEMA:
        raise UnknownSchema(f"schema {packed[0]}; this build reads schema {SCHEMA}")
    return memoryview(packed)[1:]
