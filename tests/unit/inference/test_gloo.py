"""How weights travel: layout, groups, deadlines."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.transports.gloo import (
    ALIGNMENT,
    CHUNK_BYTES,
    SERVER,
    TRAINER,
    TransferGroup,
    WeightLayout,
    connect_store,
    create_store,
    is_published,
    publish_key,
)
from pipeline.utils.subprocesses import hold_port
from pipeline.utils.waiting import Deadline, wait_for

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8])
TENSORS = st.lists(st.tuples(SHAPES, DTYPES), max_size=6)


def named(specifications: list[tuple[tuple[int, ...], torch.dtype]]) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [(f"p{i}", torch.randn(shape).mul(9).to(dtype)) for i, (shape, dtype) in enumerate(specifications)]


@given(TENSORS)
def test_a_buffer_holds_every_tensor_exactly_whatever_its_type_and_shape(
    specifications: list[tuple[tuple[int, ...], torch.dtype]],
) -> None:
    tensors = named(specifications)
    layout = WeightLayout.parse(WeightLayout.of(tensors).plain())
    views = layout.views(layout.pack(tensors))
    assert [name for name, _ in views] == [name for name, _ in tensors]
    for (_, view), (_, tensor) in zip(views, tensors, strict=True):
        assert view.dtype == tensor.dtype
        assert torch.equal(view, tensor)
        assert view.storage_offset() * view.itemsize % ALIGNMENT == 0


def test_a_transposed_tensor_is_packed_as_it_reads() -> None:
    tensors = [("t", torch.arange(6).reshape(2, 3).T)]
    layout = WeightLayout.of(tensors)
    assert torch.equal(layout.views(layout.pack(tensors))[0][1], tensors[0][1])


def test_a_packed_buffer_does_not_follow_the_tensors() -> None:
    weight = torch.ones(3)
    layout = WeightLayout.of([("w", weight)])
    buffer = layout.pack([("w", weight)])
    weight.zero_()
    assert torch.equal(layout.views(buffer)[0][1], torch.ones(3))


@pytest.mark.parametrize(
    "other", [[("x", torch.ones(3))], [("w", torch.ones(4))], [("w", torch.ones(3, dtype=torch.int8))], []], ids=str
)
def test_parameters_that_changed_are_refused(other: list[tuple[str, torch.Tensor]]) -> None:
    with pytest.raises(WeightSyncError, match="not those that were announced"):
        WeightLayout.of([("w", torch.ones(3))]).pack(other)


@contextmanager
def two_members() -> Iterator[tuple[TransferGroup, TransferGroup]]:
    """A trainer's and a server's end of a group, in two threads of this process."""
    with hold_port() as holder:
        port = holder.getsockname()[1]
        store = create_store("127.0.0.2", port, "password", 10)
        visitor = connect_store("127.0.0.2", port, "password", 10)
        ends: dict[int, TransferGroup] = {}

        def join() -> None:
            ends[SERVER] = TransferGroup(visitor, "g", SERVER, "127.0.0.3", 10)

        thread = threading.Thread(target=join)
        thread.start()
        ends[TRAINER] = TransferGroup(store, "g", TRAINER, "127.0.0.2", 10)
        thread.join()
        yield ends[TRAINER], ends[SERVER]


def test_all_chunks_of_a_large_buffer_arrive_in_order_with_their_version() -> None:
    sent = torch.arange(CHUNK_BYTES // 4 + 5, dtype=torch.int32).view(torch.uint8)
    received = torch.zeros_like(sent)
    versions: list[int] = []
    with two_members() as (trainer, server):
        deadline = Deadline("the bytes", 10)
        receiver = threading.Thread(target=lambda: versions.append(server.receive(received, deadline)))
        receiver.start()
        trainer.send(41, sent, deadline)
        receiver.join()
    assert versions == [41]
    assert torch.equal(sent, received)


def test_who_waits_for_bytes_that_do_not_come_is_told_at_the_deadline() -> None:
    with two_members() as (_, server):
        started = time.monotonic()
        with pytest.raises(WeightSyncError, match="the bytes"):
            server.receive(torch.zeros(8, dtype=torch.uint8), Deadline("the bytes", 0.3))
        assert time.monotonic() - started < 60


def test_a_member_that_leaves_ends_the_others_wait_at_once() -> None:
    failures: list[float] = []

    def wait(server: TransferGroup, started: float) -> None:
        with pytest.raises(WeightSyncError):
            server.receive(torch.zeros(8, dtype=torch.uint8), Deadline("the bytes", 10))
        failures.append(time.monotonic() - started)

    with two_members() as (trainer, server):
        waiter = threading.Thread(target=wait, args=(server, time.monotonic()))
        waiter.start()
        del trainer  # its last holder is `two_members`, which ends here
    waiter.join()
    assert failures[0] < 5


def test_an_announcement_is_seen_and_only_under_its_name() -> None:
    with hold_port() as holder:
        port = holder.getsockname()[1]
        store = create_store("127.0.0.2", port, "password", 5)
        visitor = connect_store("127.0.0.2", port, "password", 5)
        assert not is_published(visitor, "g")
        publish_key(store, "g")
        wait_for("the announcement to arrive", lambda: is_published(visitor, "g"), 5)
        assert not is_published(visitor, "h")


def test_the_store_listens_on_its_own_address_only() -> None:
    with hold_port() as holder:
        port = holder.getsockname()[1]
        store = create_store("127.0.0.2", port, "password", 5)
        with pytest.raises(WeightSyncError, match=r"no trainer at 127\.0\.0\.9"):
            connect_store("127.0.0.9", port, "password", 0.5)
        del store


def test_a_group_is_not_met_where_a_stranger_says() -> None:
    with hold_port() as holder:
        port = holder.getsockname()[1]
        store = create_store("127.0.0.2", port, "password", 5)
        stranger = TCPStore("127.0.0.2", port, is_master=False)
        for key in ("0/0", "0"):
            stranger.set(f"g/{key}", "the address of the stranger")
        with pytest.raises(WeightSyncError, match="carries no signature with this world's secret"):
            TransferGroup(store, "g", SERVER, "127.0.0.3", 1)


def test_without_a_trainer_there_is_a_clear_error() -> None:
    with hold_port() as holder, pytest.raises(WeightSyncError, match="no trainer at"):
        connect_store("127.0.0.2", holder.getsockname()[1], "password", 0.5)
