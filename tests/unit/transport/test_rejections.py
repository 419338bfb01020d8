"""What is reported of entries that their reader rejects."""

import logging

import pytest

from pipeline.transport.record_wire import encode_record
from pipeline.transport.rejections import REJECTED_BYTES, REPORT_SECONDS, LostGroup, Rejections
from pipeline.transport.sample_records import Group, PreparedGroup
from tests.fakes.clock import FakeClock
from tests.unit.rollout.test_sample_store import a_sample

BOOL = a_sample(metrics={"won": True})
"""Encoded, but not decoded: a metric is a float."""


@pytest.mark.parametrize("prepared", [False, True])
def test_the_group_of_an_entry_that_is_no_record_is_named(prepared: bool) -> None:
    group = Group(position=7, prompt=3, samples=(BOOL,))
    rejections = Rejections("groups")
    data = encode_record(PreparedGroup(group=group, outcome="x" * REJECTED_BYTES) if prepared else group)
    assert rejections.note(data, "why").data == data[:REJECTED_BYTES]
    assert rejections.take() == [LostGroup(7, 3, "why")]
    assert rejections.take() == []


@pytest.mark.parametrize("position", [-1, "7", None])
def test_damaged_bytes_and_a_position_that_is_none_name_no_group(position: object) -> None:
    rejections = Rejections("groups")
    data = encode_record(Group(position=7, prompt=3))
    rejections.note(data[:-1] + bytes([data[-1] ^ 1]), "damaged")
    rejections.note(b"", "empty")
    rejections.note(encode_record(Group(position=position, prompt=3)), "odd")  # type: ignore[arg-type]
    assert rejections.take() == []


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
