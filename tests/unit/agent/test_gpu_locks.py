"""Claims of GPUs within one process; those of several are in tests/protocol."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.utils.waiting import Clock
from slurm.agent import gpu_locks
from slurm.agent.gpu_locks import Claimant, claim_gpus, claim_visible, folder_of_this_boot, missing_gpus
from slurm.agent.preflight import GIB, Gpu

MACHINE = tuple(Gpu(index=index, uuid=f"GPU-{index}", total=80 * GIB) for index in range(4))
RUN = Claimant(run_id="demo-1f3a", attempt="local-0", pid=4711, user="ann")


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def indices(claimed: gpu_locks.ClaimResult) -> list[int]:
    return [gpu.index for gpu in claimed.gpus]


def test_who_has_a_gpu_is_told_by_run_process_and_user(tmp_path: Path, held: ExitStack) -> None:
    assert indices(claim_gpus(MACHINE[:1], [1], RUN, held, tmp_path / "gpus")) == [0]
    other = Claimant(run_id="other", attempt="local-1")
    refused = claim_gpus(MACHINE[:1], [1], other, held, tmp_path / "gpus")
    assert refused.gpus == ()
    assert refused.problem == "1 GPU needed, 0 of 1 free (GPU 0 is claimed by run demo-1f3a (pid 4711 of ann))"


def test_a_gpu_whose_memory_a_stranger_holds_is_passed_over(tmp_path: Path, held: ExitStack) -> None:
    busy = Gpu(index=0, uuid="GPU-0", used=12 * GIB, total=80 * GIB)
    machine = (busy, *MACHINE[1:])
    assert indices(claim_gpus(machine, [2], RUN, held, tmp_path / "gpus")) == [1, 2]
    late = claim_gpus(machine, [2], Claimant(run_id="late", attempt="local-1"), held, tmp_path / "gpus")
    assert late.problem == (
        "2 GPUs needed, 1 of 4 free (another process holds 12.0 GiB of GPU 0; "
        "GPU 1 is claimed by run demo-1f3a (pid 4711 of ann); GPU 2 is claimed by run demo-1f3a (pid 4711 of ann))"
    )


def test_ranks_take_the_seats_in_turn_and_a_rank_s_own_claim_does_not_count(tmp_path: Path, held: ExitStack) -> None:
    def claim(rank: int, needs: tuple[int, ...] = (1, 2, 0)) -> list[int]:
        claimant = Claimant(run_id="demo", attempt="local-0", rank=rank)
        return indices(claim_gpus(MACHINE, needs, claimant, held, tmp_path / "gpus"))

    assert [claim(3), claim(0), claim(1), claim(2)] == [[0, 1], [2], [], []]


def test_two_seats_of_one_size_are_two(tmp_path: Path, held: ExitStack) -> None:
    ranks = [Claimant(run_id="demo", attempt="local-0", rank=rank) for rank in range(3)]
    taken = [indices(claim_gpus(MACHINE, [2, 2], rank, held, tmp_path / "gpus")) for rank in ranks]
    assert taken == [[0, 1], [2, 3], []]


def test_looking_for_free_gpus_keeps_none(tmp_path: Path, held: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_locks, "find_gpus", lambda _visible: MACHINE)
    folder = tmp_path / "gpus"
    assert missing_gpus(None, 4, folder) == ""
    assert missing_gpus(None, 4, folder) == ""
    assert missing_gpus(None, 0, tmp_path / "none" / "such") == ""
    assert missing_gpus(None, 5, folder) == "5 GPUs needed, 4 of 4 free"
    claim_gpus(MACHINE, [1], RUN, held, folder)
    assert "4 GPUs needed, 3 of 4 free (GPU 0 is claimed by run demo-1f3a" in missing_gpus(None, 4, folder)


def test_without_gpus_it_says_where_they_may_have_gone(tmp_path: Path, held: ExitStack) -> None:
    said = claim_gpus((), [2], RUN, held, tmp_path / "gpus").problem
    assert said == "2 GPUs needed; this machine has none, or CUDA_VISIBLE_DEVICES hides them"


def test_parts_of_gpus_are_refused(held: ExitStack) -> None:
    said = claim_visible("MIG-7f2a,MIG-80bb", [1], RUN, held).problem
    assert said == "CUDA_VISIBLE_DEVICES names parts of GPUs (MIG-7f2a, MIG-80bb); a role needs whole ones"
    assert claim_visible("MIG-7f2a", [0, 0], RUN, held).problem == ""


def test_anybody_may_lock_and_sign_and_nobody_remove_another_s_lock(tmp_path: Path, held: ExitStack) -> None:
    folder = tmp_path / "gpus"
    before = os.umask(0o077)
    try:
        claim_gpus(MACHINE, [1], RUN, held, folder)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o7777 == 0o1777
    assert {path.name: path.stat().st_mode & 0o7777 for path in folder.iterdir()} == dict.fromkeys(
        ["turn", *(gpu.uuid for gpu in MACHINE)], 0o666
    )


def test_no_child_inherits_a_claim(tmp_path: Path, held: ExitStack) -> None:
    folder = tmp_path / "gpus"
    claim_gpus(MACHINE, [2], RUN, held, folder)
    mine = [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if _leads_into(fd, folder)]
    assert len(mine) == 2
    assert not any(os.get_inheritable(fd) for fd in mine)


def _leads_into(descriptor: Path, folder: Path) -> bool:
    try:
        return descriptor.readlink().is_relative_to(folder)
    except OSError:
        return False


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: folder.write_text(""), "it is not a folder"),
        (lambda folder: folder.symlink_to("/"), "it is not a folder"),
        (lambda folder: (folder.mkdir(), (folder / "GPU-0").symlink_to("/etc/passwd")), "Too many levels of symbolic"),
        (lambda folder: (folder.mkdir(), os.mkfifo(folder / "GPU-0")), "GPU-0 is not a regular file"),
        (lambda folder: (folder.mkdir(), (folder / "turn").mkdir()), "Is a directory"),
    ],
)
def test_a_folder_that_somebody_spoilt_is_named_with_the_mend(spoil, said, tmp_path: Path, held: ExitStack) -> None:
    spoil(tmp_path / "gpus")
    problem = claim_gpus(MACHINE, [1], RUN, held, tmp_path / "gpus").problem
    assert problem.startswith(f"cannot claim GPUs in {tmp_path / 'gpus'}: {said}")
    assert problem.endswith("; its owner must remove it")


def test_whoever_is_stopped_while_it_claims_holds_up_nobody_for_ever(tmp_path: Path, held: ExitStack) -> None:
    folder = tmp_path / "gpus"
    folder.mkdir()
    (folder / "turn").touch()
    with (folder / "turn").open() as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        problem = claim_gpus(MACHINE, [1], RUN, held, folder, Impatient()).problem
    assert "waited 30.0 s for other processes to claim GPUs; a process that claims there is stopped" in problem


class Impatient(Clock):
    """A clock on which pauses cost no time."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += max(seconds, 1.0)


@pytest.mark.parametrize("text", ["", "no JSON", '{"run_id": 5}', "\xff"])
def test_a_lock_that_is_signed_by_nonsense_is_held_all_the_same(text: str, tmp_path: Path, held: ExitStack) -> None:
    folder = tmp_path / "gpus"
    claim_gpus(MACHINE[:1], [1], RUN, held, folder)
    (folder / "GPU-0").write_bytes(text.encode("latin-1"))
    other = Claimant(run_id="other", attempt="local-1")
    assert "claimed by run unknown" in claim_gpus(MACHINE[:1], [1], other, held, folder).problem


def test_a_signature_commands_no_terminal() -> None:
    assert str(Claimant(run_id="a\x1b[2Jb\n", attempt="", pid=1, user="u" * 200)) == f"run a[2Jb (pid 1 of {'u' * 80})"


def test_gpus_without_a_uuid_are_told_apart_by_their_number(tmp_path: Path, held: ExitStack) -> None:
    machine = (Gpu(index=0), Gpu(index=1))
    assert indices(claim_gpus(machine, [1], RUN, held, tmp_path / "gpus")) == [0]
    other = Claimant(run_id="other", attempt="local-1")
    assert indices(claim_gpus(machine, [1], other, held, tmp_path / "gpus")) == [1]


def test_the_folder_is_this_boot_s_and_the_same_for_every_tmpdir(monkeypatch: pytest.MonkeyPatch) -> None:
    before = folder_of_this_boot()
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    assert folder_of_this_boot() == before
    assert before.name.endswith(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
