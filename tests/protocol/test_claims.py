"""GPUs that processes of one machine claim, each a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.integration

Claim = tuple[list[int], str]
NOBODY = 65534


class Claimer:
    """A process that claims once it is told to."""

    def __init__(
        self, folder: Path, *, gpus: int, needs: Sequence[int], run: str = "demo", rank: int = 0, **popen: Any
    ) -> None:
        arguments = [str(folder), str(gpus), ",".join(map(str, needs)), run, str(rank)]
        command = [sys.executable, "-m", "tests.protocol.claimer", *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, **popen
        )

    def begin(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")

    def claim(self) -> Claim:
        """What it got, or the sentence why it got nothing."""
        assert self.process.stdout
        indices, problem = json.loads(self.process.stdout.readline())
        return indices, problem

    def end(self) -> None:
        self.process.communicate(timeout=WAIT_SECONDS)


@pytest.fixture
def claimer(tmp_path: Path) -> Iterator[Callable[..., Claimer]]:
    """Starts processes that claim in one folder; all are ended afterwards."""
    started: list[Claimer] = []

    def start(**arguments: Any) -> Claimer:
        started.append(Claimer(arguments.pop("folder", tmp_path / "gpus"), **arguments))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def at_once(claimers: Sequence[Claimer]) -> list[Claim]:
    for one in claimers:
        one.begin()
    return [one.claim() for one in claimers]


def test_runs_that_start_together_share_no_gpu(claimer: Callable[..., Claimer]) -> None:
    runs = [claimer(gpus=8, needs=[2], run=f"run-{number}") for number in range(4)]
    claims = at_once(runs)
    assert [problem for _, problem in claims] == [""] * 4
    assert sorted(index for indices, _ in claims for index in indices) == list(range(8))


def test_of_two_runs_that_need_most_gpus_one_gets_them_and_the_other_learns_who_has_them(
    claimer: Callable[..., Claimer],
) -> None:
    runs = [claimer(gpus=4, needs=[3], run=f"run-{number}") for number in range(2)]
    claims = at_once(runs)
    winner, loser = (0, 1) if claims[0][0] else (1, 0)
    assert claims[winner] == ([0, 1, 2], "")
    assert claims[loser][0] == []
    problem = claims[loser][1]
    assert problem.startswith("3 GPUs needed, 1 of 4 free (GPU 0 is claimed by run run-")
    assert f"GPU 2 is claimed by run run-{winner} (pid {runs[winner].process.pid} of " in problem


@pytest.mark.parametrize("killed", [False, True])
def test_a_claim_ends_with_its_process(killed: bool, claimer: Callable[..., Claimer]) -> None:
    first = claimer(gpus=2, needs=[2], run="first")
    assert at_once([first]) == [([0, 1], "")]
    assert "2 GPUs needed, 0 of 2 free" in at_once([claimer(gpus=2, needs=[2])])[0][1]
    if killed:
        first.process.kill()
        first.process.wait()
    else:
        first.end()
    assert at_once([claimer(gpus=2, needs=[2])]) == [([0, 1], "")]


def test_the_virtual_nodes_of_a_run_take_the_seats_in_turn(claimer: Callable[..., Claimer]) -> None:
    ranks = [claimer(gpus=5, needs=[0, 3, 2], rank=rank) for rank in range(4)]
    claims = at_once(ranks)
    assert [problem for _, problem in claims] == [""] * 4
    assert sorted(len(indices) for indices, _ in claims) == [0, 0, 2, 3]
    assert sorted(index for indices, _ in claims for index in indices) == list(range(5))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of two users")
def test_the_runs_of_two_users_share_no_gpu(claimer: Callable[..., Claimer]) -> None:
    reads = subprocess.run(
        [sys.executable, "-c", "import tests.protocol.claimer"], user=NOBODY, stderr=subprocess.DEVNULL
    )
    if reads.returncode:
        pytest.skip("another user cannot read this checkout")
    shared = Path(mkdtemp(prefix="rollcall-test-"))
    try:
        shared.chmod(0o1777)
        folder = shared / "gpus"
        mine = claimer(folder=folder, gpus=2, needs=[1], run="mine")
        assert at_once([mine]) == [([0], "")]
        others = claimer(folder=folder, gpus=2, needs=[1], run="theirs", user=NOBODY, group=NOBODY, umask=0o077)
        assert at_once([others]) == [([1], "")]
        mine.end()
        both = claimer(folder=folder, gpus=2, needs=[2], run="late")
        (claim,) = at_once([both])
        assert f"GPU 1 is claimed by run theirs (pid {others.process.pid} of " in claim[1]
        others.end()
        wait_for("the claims to end", lambda: at_once([claimer(folder=folder, gpus=2, needs=[2])])[0][0], WAIT_SECONDS)
    finally:
        shutil.rmtree(shared)
