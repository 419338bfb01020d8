"""The journal of episodes in flight: what is on disk is what is live, whatever was dropped, killed or full."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.rollout import episode_journal
from pipeline.rollout.episode_journal import EpisodeJournal
from pipeline.transport.topic_segments import segments
from pipeline.utils.waiting import wait_for
from tests.fakes.full_disk import room_for
from tests.patience import WAIT_SECONDS

BOUND = 1 << 20


def contents(folder: Path, bound: int = BOUND) -> dict[int, dict[tuple[int, int], bytes]]:
    """All entries that the next actor finds."""
    with EpisodeJournal(folder, bound) as journal:
        return {position: dict(journal.entries(position)) for position in range(8) if journal.entries(position)}


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_the_next_actor_has_the_events_of_a_lost_one_in_their_order(tmp_path: Path) -> None:
    lost = EpisodeJournal(tmp_path, BOUND)
    lost.__enter__()  # never closed
    for sample, number in ((1, 0), (0, 0), (0, 1)):
        lost.add(3, sample, number, f"{sample} {number}".encode())
    wait_for("the entries", lambda: bytes_of(tmp_path) > 40, WAIT_SECONDS)
    assert contents(tmp_path) == {3: {(0, 0): b"0 0", (0, 1): b"0 1", (1, 0): b"1 0"}}


def test_a_dropped_group_and_a_dropped_sample_are_gone_and_may_begin_again(tmp_path: Path) -> None:
    with EpisodeJournal(tmp_path, BOUND) as journal:
        for position in (1, 2):
            for sample in (0, 1):
                journal.add(position, sample, 0, b"first")
    with EpisodeJournal(tmp_path, BOUND) as journal:
        journal.drop(1)
        journal.drop(2, sample=0)
        journal.add(2, 0, 0, b"second")
        assert dict(journal.entries(1)) == {}
    assert contents(tmp_path) == {2: {(0, 0): b"second", (1, 0): b"first"}}


def test_only_wanted_groups_are_retained(tmp_path: Path) -> None:
    with EpisodeJournal(tmp_path, BOUND) as journal:
        for position in range(4):
            journal.add(position, 0, 0, b"event")
        journal.retain(lambda position: position == 2)
    assert list(contents(tmp_path)) == [2]


Steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.integers(0, 1), st.binary(min_size=1, max_size=40)),
        st.tuples(st.just("drop"), st.integers(0, 3), st.integers(-1, 1), st.just(b"")),
        st.tuples(st.just("reopen"), st.just(0), st.just(0), st.just(b"")),
    ),
    max_size=40,
)


def drop_expected(expected: dict[int, dict[tuple[int, int], bytes]], position: int, sample: int) -> None:
    group = expected.pop(position, {})
    if left := {key: value for key, value in group.items() if sample not in (-1, key[0])}:
        expected[position] = left


@settings(max_examples=20, deadline=None)
@given(steps=Steps)
def test_the_files_hold_what_was_added_and_not_dropped(tmp_path_factory: pytest.TempPathFactory, steps: object) -> None:
    """With a segment for every few entries."""
    folder, expected = tmp_path_factory.mktemp("episodes"), dict[int, dict[tuple[int, int], bytes]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(episode_journal, "SLACK_BYTES", 60)
        journal, numbers = EpisodeJournal(folder, BOUND), iter(range(100))
        journal.__enter__()
        for step, position, sample, event in steps:  # type: ignore[attr-defined]
            if step == "add":
                number = next(numbers)
                journal.add(position, sample, number, event)
                expected.setdefault(position, {})[sample, number] = event
            elif step == "drop":
                journal.drop(position, sample)
                drop_expected(expected, position, sample)
            else:
                journal.__exit__(None, None, None)
                journal = EpisodeJournal(folder, BOUND)
                journal.__enter__()
        journal.__exit__(None, None, None)
        assert contents(folder) == expected


def test_the_files_stay_small_however_many_groups_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_journal, "SLACK_BYTES", 1 << 12)
    with EpisodeJournal(tmp_path, BOUND) as journal:
        journal.add(0, 0, 0, b"stays")
        for position in range(1, 200):
            journal.add(position, 0, 0, b"x" * 1000)
            if position % 10 == 0:
                wait_for("the writer", lambda: not journal._unwritten, WAIT_SECONDS)
            journal.drop(position)
    assert bytes_of(tmp_path) < 3 << 12
    assert len(segments(tmp_path)) == 1
    assert contents(tmp_path) == {0: {(0, 0): b"stays"}}


def test_entries_beyond_the_bound_are_not_recorded_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with EpisodeJournal(tmp_path, bound=1000) as journal:
        for number in range(10):
            journal.add(0, 0, number, b"x" * 300)
        assert journal.live_bytes <= 1000
        assert len(journal.entries(0)) == 3
        journal.drop(0)
        journal.add(1, 0, 0, b"x" * 300)
    assert list(contents(tmp_path)) == [1]
    assert [record.message for record in caplog.records] == [
        "episodes in flight are recorded no further: their entries exceed rollout.journal_bytes"
    ]


def test_a_replaced_actor_adds_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    replaced = EpisodeJournal(tmp_path, BOUND)
    replaced.__enter__()
    with EpisodeJournal(tmp_path, BOUND) as journal:
        replaced.add(0, 0, 0, b"late")
        wait_for("its end", lambda: not replaced.is_open, WAIT_SECONDS)
        journal.add(1, 0, 0, b"own")
    assert list(contents(tmp_path)) == [1]
    assert "no longer recorded: another process writes" in caplog.text


def test_a_torn_entry_costs_only_itself(tmp_path: Path) -> None:
    with EpisodeJournal(tmp_path, BOUND) as journal:
        journal.add(0, 0, 0, b"whole")
        journal.add(0, 0, 1, b"torn")
    (segment,) = tmp_path.iterdir()
    segment.write_bytes(segment.read_bytes()[:-2])
    assert contents(tmp_path) == {0: {(0, 0): b"whole"}}


def test_what_a_full_disk_refused_is_written_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with EpisodeJournal(tmp_path, BOUND) as journal:
        with room_for(100):
            journal.add(0, 0, 0, b"x" * 200)
            wait_for("the failure", lambda: "while the disk fails" in caplog.text, WAIT_SECONDS)
        journal.add(0, 0, 1, b"after")
    assert contents(tmp_path) == {0: {(0, 0): b"x" * 200, (0, 1): b"after"}}


def test_without_a_bound_there_is_no_journal(tmp_path: Path) -> None:
    with EpisodeJournal(tmp_path / "episodes", 0) as journal:
        journal.add(0, 0, 0, b"event")
        assert not journal.is_open
    assert not (tmp_path / "episodes").exists()


def test_a_folder_that_cannot_be_made_disables_the_journal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "episodes").write_text("a file")
    with EpisodeJournal(tmp_path / "episodes", BOUND) as journal:
        journal.add(0, 0, 0, b"event")
        assert not journal.is_open
    assert "episodes in flight are not recorded" in caplog.text
