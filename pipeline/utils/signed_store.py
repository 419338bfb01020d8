"""Messages that only who holds the world's secret can have written.

Owns the signature (HMAC-SHA256) on what goes through torch's stores and object collectives, which listen to everybody
and unpickle what they are given. Promises that nothing is unpickled, and no address believed, before its signature is
checked; that what was signed under one key of a store is nothing under another; and that the secret itself never
travels. A stranger can still disturb: delete a key, or raise a counter, which carries no signature. Must not know what
is sent.

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
    """`body` after its tag, which belongs to this `purpose` alone."""
    return _tag(secret, purpose, body) + body


def verified(secret: str, purpose: str, data: bytes) -> bytes:
    """The body of what `sign` wrote with the same secret for the same purpose; `SignatureError` for anything else."""
    tag, body = data[:_TAG_BYTES], data[_TAG_BYTES:]
    if not hmac.compare_digest(tag, _tag(secret, purpose, body)):
        raise SignatureError(
            f"{purpose} carries no signature with this world's secret ({len(data)} bytes): somebody who is not of the "
            "run wrote to its ports; look who else reaches them, and set cluster.network to a network of your own"
        )
    return body


class SignedStore(Store):
    """A store whose values are signed. Keep a reference for as long as a group uses it: torch's C++ keeps none."""

    def __init__(self, inner: Store, secret: str) -> None:
        super().__init__()
        self._inner, self._secret = inner, secret

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(key, self._signed(key, value))  # type: ignore[arg-type]  # bytes are taken too

    def get(self, key: str) -> bytes:
        return verified(self._secret, _value_of(key), self._inner.get(key))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """The value that is there now. An `expected_value` of nothing means: if there is none."""
        expected = self._signed(key, expected_value) if expected_value else b""
        found = self._inner.compare_set(key, expected, self._signed(key, desired_value))  # type: ignore[arg-type]
        return verified(self._secret, _value_of(key), found)

    def add(self, key: str, value: int) -> int:
        """A counter: unsigned."""
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
    """Sign what every object collective of this process sends, and check what it gets, until the block ends.

    Torch has no such setting; its pickler and unpickler are the one place that all of them share, DCP's too.
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
    """The purpose has a key of its own, so that no purpose and body together read like another pair."""
    own = hmac.digest(secret.encode(), purpose.encode(), "sha256")
    return hmac.digest(own, body, "sha256")


def _value_of(key: str) -> str:
    return f"the value of {key} in the store"
