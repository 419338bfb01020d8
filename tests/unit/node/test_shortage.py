"""The kernel's count of processes that it ended for lack of memory."""

from pathlib import Path

import pytest

from slurm.node import shortage


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "vmstat"
    monkeypatch.setattr(shortage, "COUNTERS", made)
    return made


def test_this_kernel_counts() -> None:
    assert "\noom_kill " in shortage.COUNTERS.read_text()
    assert shortage.ended_for_memory() >= 0


def test_the_count_is_the_one_of_that_name(counters: Path) -> None:
    counters.write_text("drop_pagecache 2\noom_kill 5\nnuma_pte_updates 0\n")
    assert shortage.ended_for_memory() == 5


@pytest.mark.parametrize("text", ["", "pgfault 7\n", None], ids=["empty", "an old kernel", "no such file"])
def test_a_kernel_that_does_not_count_has_ended_none(counters: Path, text: str | None) -> None:
    if text is not None:
        counters.write_text(text)
    assert shortage.ended_for_memory() == 0
