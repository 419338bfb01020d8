"""What is reported of entries that their reader rejects."""

import logging

import pytest

from pipeline.transport.record_wire import encode_record
from pipeline.transport.rejections import REJECTED_BYTES, REPORT_SECONDS, Rejected, Rejections, lost_group
from pipeline.transport.sample_records import Group, PreparedGroup
from tests.fakes.clock import FakeClock
from tests.unit.rollout.test_sample_store import a_sample

BOOL = a_sample(metrics={"won": True})
"""Encoded, but not decoded: a metric is a float."""


@pytest.mark.parametrize("prepared", [False, True])
def test_the_group_of_an_entry_that_is_no_record_is_named(prepared: bool) -> None:
    group = Group(position=7, prompt=3, samples=(BOOL,))
    data = encode_record(PreparedGroup(group=group) if prepared else group)
    assert lost_group(data, "why") == PreparedGroup(group=Group(position=7, prompt=3), outcome="malformed: why")


@pytest.mark.parametrize("position", [-1, "7", None])
def test_damaged_bytes_and_a_position_that_is_none_name_no_group(position: object) -> None:
    data = encode_record(Group(position=7, prompt=3))
    assert lost_group(data[:-1] + bytes([data[-1] ^ 1]), "damaged") is None
    assert lost_group(b"", "empty") is None
    assert lost_group(encode_record(Group(position=position, prompt=3)), "odd") is None  # type: ignore[arg-type]


def test_of_a_rejected_entry_the_beginning_is_kept_with_the_reason() -> None:
    data = bytes(2 * REJECTED_BYTES)
    assert Rejections("groups").note(data, "why") == Rejected(id="", reason="why", data=data[:REJECTED_BYTES])


def test_the_first_entry_is_logged_and_then_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    rejections = Rejections("groups", clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            rejections.note(b"", "first")
        clock.time += REPORT_SECONDS
        for _ in range(3):
            rejections.note(b"", "later")
    assert [record.message for record in caplog.records] == [
        "topic 'groups': 1 entries rejected, the last: first",
        "topic 'groups': 4 entries rejected, the last: later",
    ]
