"""Signed messages for torch's stores and object collectives, which accept any peer and unpickle any bytes.

The signature is HMAC-SHA256 with the run's secret, which is never sent. No value is unpickled, and no address is used,
before its signature is verified. A value signed for one key of a store is invalid under another key. An outsider can
still disturb a run: delete a key, or increment a counter, since counters carry no signature.

    store = SignedStore(TCPStore(...), secret)
    with signed_objects(secret):
        dist.init_process_group("gloo", store=store, ...)
        dist.broadcast_object_list(...)
"""

import hmac
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import IO, Any

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from pipeline.errors import SignatureError

_TAG_BYTES = 32
_OBJECT = "an object of a collective"


def sign(secret: str, purpose: str, body: bytes) -> bytes:
    """`body` prefixed with its 32-byte tag, which is valid for this `purpose` only."""
    return _tag(secret, purpose, body) + body


def verified(secret: str, purpose: str, data: bytes) -> bytes:
    """The body of bytes that `sign` made with the same secret and purpose; `SignatureError` for any other bytes."""
    tag, body = data[:_TAG_BYTES], data[_TAG_BYTES:]
    if not hmac.compare_digest(tag, _tag(secret, purpose, body)):
        raise SignatureError(
            f"{purpose} carries no signature with this world's secret ({len(data)} bytes): a program outside the run "
            "wrote to its ports; check which machines can reach them, and set cluster.network to a private network"
        )
    return body


class SignedStore(Store):
    """A store with signed values. Hold a reference as long as a group uses it, because torch's C++ holds none."""

    def __init__(self, inner: Store, secret: str) -> None:
        super().__init__()
        self._inner, self._secret = inner, secret

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(key, self._signed(key, value))  # type: ignore[arg-type]  # torch accepts bytes too

    def get(self, key: str) -> bytes:
        return verified(self._secret, _value_of(key), self._inner.get(key))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set the key if it holds `expected_value` (empty: if it is absent). Returns the value it holds afterwards."""
        expected = self._signed(key, expected_value) if expected_value else b""
        stored = self._inner.compare_set(key, expected, self._signed(key, desired_value))  # type: ignore[arg-type]
        return verified(self._secret, _value_of(key), stored)

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which carries no signature. Returns its new value."""
        return self._inner.add(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._inner.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._inner.wait(list(keys))
        else:
            self._inner.wait(list(keys), timeout)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        return self._inner.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    deleteKey, getNumKeys = delete_key, num_keys  # the names by which torch's C++ calls them

    def _signed(self, key: str, value: str | bytes) -> bytes:
        return sign(self._secret, _value_of(key), value.encode() if isinstance(value, str) else bytes(value))


@contextmanager
def signed_objects(secret: str) -> Iterator[None]:
    """Sign and verify the messages of every object collective of this process until the block ends.

    Torch has no setting for this. All object collectives, also those of DCP, use the pickler and unpickler of
    `distributed_c10d`, which are replaced here.
    """

    class Writer:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            self._file.write(sign(secret, _OBJECT, pickle.dumps(value)))

    class SignedReader:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def load(self) -> Any:
            return pickle.loads(verified(secret, _OBJECT, self._file.read()))

    torch: Any = distributed_c10d
    before = torch._pickler, torch._unpickler
    torch._pickler, torch._unpickler = Writer, SignedReader
    try:
        yield
    finally:
        torch._pickler, torch._unpickler = before


def _tag(secret: str, purpose: str, body: bytes) -> bytes:
    # A key per purpose: concatenating purpose and body would let two different pairs share a tag.
    key = hmac.digest(secret.encode(), purpose.encode(), "sha256")
    return hmac.digest(key, body, "sha256")


def _value_of(key: str) -> str:
    return f"the value of {key} in the store"
