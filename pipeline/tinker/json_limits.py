"""How many values a body has, before it is parsed.

Parsers of JSON and protobuf hold Python's only lock while they work, and make objects many times as large as what they
read: 8 MB of `[]` keep a server from everybody else for seconds. Owns the bounds. Promises that a body within them is
parsed in a fraction of a second. Pure.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from pipeline.tinker.api_errors import ApiError

MAX_JSON = 1 << 22
"""Bytes of a JSON body: prompts and settings, never what is trained."""
MAX_PARTS = 1 << 16
"""Lists, objects and keys of a JSON body."""
MAX_FIELDS = 1 << 18
"""Fields of a protobuf body, those of messages within it too."""
SMALL_BYTES = 1 << 20
"""A protobuf body below this size is parsed at once, whatever is in it."""
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT = 10


def json_object(body: bytes) -> dict[str, Any]:
    """The object in a JSON body; `ApiError` if it is none, or has too many parts or levels."""
    if sum(map(body.count, (b"[", b"{", b":"))) > MAX_PARTS:
        raise ApiError(f"the body has more than {MAX_PARTS} lists, objects and keys", 413)
    try:
        fields = msgspec.json.decode(body)
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ApiError("the body is no JSON object")
    return fields


def check_fields(body: bytes, kind: Any) -> None:
    """`ApiError` unless a protobuf body, a message of this descriptor, has few enough fields, or is small."""
    if len(body) <= SMALL_BYTES:
        return
    left, waiting = MAX_FIELDS, [(memoryview(body), kind)]
    while waiting:
        data, kind = waiting.pop()
        inner = {field.number: field.message_type for field in kind.fields if field.message_type}
        for number, value in _fields(data):
            left -= 1
            if left < 0:
                raise ApiError(f"the body has more than {MAX_FIELDS} fields; send fewer data at a time", 413)
            if value is not None and number in inner:
                waiting.append((value, inner[number]))


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | None]]:
    """Number and content of each field of a message; None for one that is a number. A torn field is the last: the
    parser reports what is wrong."""
    at = 0
    try:
        while at < len(data):
            tag, at = _varint(data, at)
            number, wire = tag >> 3, tag & 7
            if wire == _LENGTH:
                length, at = _varint(data, at)
                yield number, data[at : at + length]
                at += length
                continue
            if wire == _VARINT:
                _, at = _varint(data, at)
            elif wire in (_FIXED32, _FIXED64):
                at += 4 if wire == _FIXED32 else 8
            else:
                raise ApiError("the body has a protobuf group, which no request has")
            yield number, None
    except IndexError:
        return


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number, and where the next field begins."""
    value = 0
    for index in range(_MAX_VARINT):
        byte = data[at + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise IndexError("a number without end")
