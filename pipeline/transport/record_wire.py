"""The wire format of all records between roles: a CRC-32, then msgpack with each record's kind and version; no pickle.

Promises that `decode_record` returns an equal record for bytes of `encode_record`, and raises `RecordError` for all
others, even with a single flipped bit. Must not know whether the values make sense.
"""

import struct
import zlib
from collections.abc import Callable
from typing import TypeVar

import msgspec

from pipeline.errors import RecordError
from pipeline.transport.eval_records import EvalRequest, EvalResult
from pipeline.transport.sample_records import WIRE_VERSION, Group, PreparedGroup, Record, Reissue, Sample

AnyRecord = Sample | Group | PreparedGroup | Reissue | EvalRequest | EvalResult
R = TypeVar("R", bound=Record)
F = TypeVar("F", bound=msgspec.Struct)
Substitute = Callable[[bytes, str], R | None]
"""Called with bytes that are no record of a kind, and the reason: the record in place of them, or None without one."""

_CHECKSUM = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyRecord)
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError)


def encode_record(record: Record) -> bytes:
    """The record as bytes: the CRC-32 of its msgpack, followed by the msgpack."""
    body = _encoder.encode(record)
    return _CHECKSUM.pack(zlib.crc32(body)) + body


def decode_record(data: bytes, kind: type[R]) -> R:
    """The record in `data`, which must be of `kind` and of this version; else `RecordError`."""
    body = _body(data)
    if body is None:
        raise RecordError(f"{len(data)} bytes are no {kind.__name__} record: their checksum differs")
    try:
        record = _decoder.decode(body)
    except _UNDECODABLE as error:
        raise RecordError(f"{len(data)} bytes are no {kind.__name__} record: {error}") from error
    if not isinstance(record, kind):
        raise RecordError(f"expected a {kind.__name__} record, found {type(record).__name__}")
    if record.version != WIRE_VERSION:
        raise RecordError(f"{kind.__name__} record of version {record.version}; this code reads version {WIRE_VERSION}")
    return record


def no_substitute(data: bytes, reason: str) -> None:
    """The `Substitute` of those who want records of their kind only."""


def decode_or_substitute(data: bytes, kind: type[R], substitute: Substitute[R]) -> R:
    """The record in `data`, or the `substitute` in place of it; `RecordError` without either."""
    try:
        return decode_record(data, kind)
    except RecordError as error:
        if (record := substitute(data, str(error))) is None:
            raise
        return record


def decode_fields(data: bytes, fields: type[F]) -> F | None:
    """The `fields` of bytes whose other parts may be no valid record; None if these cannot be read either."""
    body = _body(data)
    try:
        return None if body is None else msgspec.msgpack.decode(body, type=fields)
    except _UNDECODABLE:
        return None


def _body(data: bytes) -> memoryview | None:
    """The msgpack of a record; None if the checksum differs."""
    body = memoryview(data)[_CHECKSUM.size :]
    return body if data[: _CHECKSUM.size] == _CHECKSUM.pack(zlib.crc32(body)) else None
