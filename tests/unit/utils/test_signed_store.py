"""What strangers write is neither believed nor unpickled."""

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore, distributed_c10d

from pipeline.errors import SignatureError
from pipeline.utils.signed_store import SignedStore, sign, signed_objects, verified


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)


@pytest.fixture
def open_store() -> TCPStore:
    """A store as torch has it: whoever reaches its port may do anything."""
    return TCPStore("127.0.0.2", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


@pytest.fixture
def ours(open_store: TCPStore) -> SignedStore:
    return SignedStore(open_store, "secret")


def test_what_was_signed_is_read_with_the_same_secret_for_the_same_purpose() -> None:
    assert verified("secret", "greeting", sign("secret", "greeting", b"hello")) == b"hello"


@pytest.mark.parametrize(
    ("secret", "purpose", "change"),
    [("guess", "greeting", 0), ("secret", "farewell", 0), ("secret", "greeting", 1), ("", "greeting", 0)],
)
def test_another_secret_purpose_or_body_is_refused(secret: str, purpose: str, change: int) -> None:
    signed = bytearray(sign("secret", "greeting", b"hello"))
    signed[-1] ^= change
    with pytest.raises(SignatureError, match=f"^{purpose} carries no signature"):
        verified(secret, purpose, bytes(signed))


def test_a_purpose_and_a_body_cannot_be_cut_elsewhere() -> None:
    signed = sign("secret", "ab", b"c")
    with pytest.raises(SignatureError):
        verified("secret", "a", signed[:32] + b"bc")


@pytest.mark.parametrize("data", [b"", b"short", bytes(32), pickle.dumps(1)], ids=repr)
def test_bytes_without_a_signature_are_refused(data: bytes) -> None:
    with pytest.raises(SignatureError):
        verified("secret", "greeting", data)


def test_a_store_gives_back_what_was_put_in_through_a_prefix_of_torch_too(ours: SignedStore) -> None:
    through = PrefixStore("group", ours)
    through.set("key", "value")
    assert ours.get("group/key") == through.get("key") == b"value"
    assert through.compare_set("key", "value", "another") == b"another"
    through.wait(["key"])
    through.wait(["key"], timedelta(seconds=1))
    assert ours.check(["group/key"])
    assert through.check(["key"])
    assert through.delete_key("key")
    assert not through.check(["key"])
    assert (through.add("count", 2), ours.add("group/count", 3)) == (2, 5)
    assert through.num_keys() == ours.num_keys()


def test_the_first_value_stays_when_it_is_to_be_set_once(ours: SignedStore) -> None:
    assert ours.compare_set("failure", "", "of rank 1") == b"of rank 1"
    assert ours.compare_set("failure", "", "of rank 2") == b"of rank 1"
    assert ours.compare_set("failure", "of rank 1", "of rank 3") == b"of rank 3"
    assert ours.get("failure") == b"of rank 3"


def test_what_a_stranger_puts_into_the_store_is_not_believed(ours: SignedStore, open_store: TCPStore) -> None:
    ours.set("address of rank 0", "10.0.0.1")
    TCPStore("127.0.0.2", open_store.port, is_master=False).set("address of rank 0", "10.0.0.66")
    with pytest.raises(SignatureError, match="a program outside the run wrote to its ports"):
        ours.get("address of rank 0")


def test_what_was_signed_for_one_key_is_nothing_under_another(ours: SignedStore, open_store: TCPStore) -> None:
    ours.set("address of rank 0", "10.0.0.1")
    open_store.set("address of rank 1", open_store.get("address of rank 0"))  # type: ignore[arg-type]
    with pytest.raises(SignatureError, match="address of rank 1"):
        ours.get("address of rank 1")


def test_who_waits_in_a_signed_store_is_told_at_the_deadline(ours: SignedStore) -> None:
    with pytest.raises(RuntimeError, match="never"):
        ours.wait(["never"], timedelta(milliseconds=50))


def test_objects_of_collectives_travel_between_those_who_hold_the_secret() -> None:
    with signed_objects("secret"):
        tensor, size = distributed_c10d._object_to_tensor({"rows": [1, 2]}, torch.device("cpu"), None)
        assert distributed_c10d._tensor_to_object(tensor, int(size), None) == {"rows": [1, 2]}


def test_an_object_of_a_stranger_is_refused_and_not_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "sprung"
    forged = torch.frombuffer(bytearray(pickle.dumps(Trap(mark))), dtype=torch.uint8)
    with (
        signed_objects("secret"),
        pytest.raises(SignatureError, match="an object of a collective carries no signature"),
    ):
        distributed_c10d._tensor_to_object(forged, len(forged), None)
    assert not mark.exists()


def test_torch_is_left_as_it_was() -> None:
    with signed_objects("secret"):
        pass
    assert (distributed_c10d._pickler, distributed_c10d._unpickler) == (pickle.Pickler, pickle.Unpickler)
