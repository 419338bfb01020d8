"""When the end of a role is said to be for lack of memory."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.agent import oom
from slurm.agent.oom import OomWatch
from tests.fakes.clock import FakeClock

TOLD = ("  traceback : Signal 9 (SIGKILL) received by PID 4711", "=====")


@pytest.fixture
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the count of the node, of a kernel that counts by no group; it is 3."""
    made = tmp_path / "vmstat"
    monkeypatch.setattr(oom, "NODE", made)
    monkeypatch.setattr(oom, "GROUPS", tmp_path / "none")

    def write(number: int) -> None:
        made.write_text(f"drop_pagecache 2\noom_kill {number}\nnuma_pte_updates 0\n")

    write(3)
    return write


def test_this_kernel_counts() -> None:
    counter = oom.find_counter()
    assert counter is not None
    assert counter.read() is not None


def test_a_process_that_is_killed_while_the_kernel_ends_some_is_explained(count: Callable[[int], None]) -> None:
    clock = FakeClock()
    watched = OomWatch(clock)
    assert watched.explains(-9, ()) == ""
    count(4)
    told = ", as the kernel ended 1 of the processes of this node for lack of memory"
    assert watched.explains(-9, ()) == told
    assert watched.explains(1, TOLD) == f", after one of its processes was killed by SIGKILL{told}"


@pytest.mark.parametrize("code", [1, 0, -15, -11])
def test_an_end_that_was_no_kill_is_not_explained_by_processes_of_others(
    code: int, count: Callable[[int], None]
) -> None:
    watched = OomWatch(FakeClock())
    count(9)
    assert watched.explains(code, ("OSError: [Errno 98] Address already in use",)) == ""


def test_what_the_kernel_ended_long_before_explains_no_kill(count: Callable[[int], None]) -> None:
    clock = FakeClock()
    watched = OomWatch(clock)
    clock.sleep(10)
    count(5)
    for _ in range(100):
        watched.look()
        clock.sleep(1)
    assert watched.explains(-9, ()) == ""
    assert watched.explains(1, TOLD) == ", after one of its processes was killed by SIGKILL"


@pytest.mark.parametrize(
    ("line", "file"),
    [("0::/job_7/step_0/task_0", "job_7/step_0/memory.events"), ("4:cpu,memory:/a", "memory/a/memory.oom_control")],
    ids=["version 2, counted above the task", "version 1"],
)
def test_a_count_of_the_control_group_comes_before_that_of_the_node(
    line: str, file: str, count: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, counter = tmp_path / "cgroup", tmp_path / "mount" / file
    groups.write_text(f"1:name=systemd:/\n{line}\n")
    counter.parent.mkdir(parents=True)
    counter.write_text("low 0\noom_kill 0\n")
    monkeypatch.setattr(oom, "GROUPS", groups)
    monkeypatch.setattr(oom, "MOUNT", tmp_path / "mount")
    watched = OomWatch(FakeClock())
    count(9)
    assert watched.explains(-9, ()) == ""
    counter.write_text("low 0\noom_kill 2\n")
    assert "ended 2 of the processes of its control group for lack of memory" in watched.explains(-9, ())


@pytest.mark.parametrize("text", ["", "pgfault 7\n", None], ids=["empty", "an old kernel", "no such file"])
def test_a_kernel_that_does_not_count_explains_nothing(
    count: Callable[[int], None], text: str | None, tmp_path: Path
) -> None:
    if text is None:
        (tmp_path / "vmstat").unlink()
    else:
        (tmp_path / "vmstat").write_text(text)
    assert OomWatch(FakeClock()).explains(-9, ()) == ""
