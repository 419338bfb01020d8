"""Locks on the GPUs of a machine without a scheduler.

Owns one lock for each GPU, named by its UUID, in a folder that all users of the machine share. Promises that two
processes with access to this folder never claim the same GPU, also if they belong to different users; that a rank gets
all the GPUs that it needs or none; that a claim ends when its process exits or is killed; and that an error names the
holder of each GPU that is not free. Must not know roles.

    with ExitStack() as held:
        claimed = claim_visible(None, [2, 0], Claimant(run_id="demo-1f3a", attempt="local-0"), held)
        claimed.gpus, claimed.problem       # two GPUs, and ""

The locks are advisory: only runs respect them. Other programs are detected by the GPU memory that they hold. Containers
must share /tmp; otherwise, CUDA_VISIBLE_DEVICES must give each container its GPUs.
"""

import getpass
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from pipeline.errors import DeadlineError
from pipeline.utils.waiting import CLOCK, Clock, wait_for
from slurm.agent.preflight import Gpu, find_gpus, parts_of_gpus
from slurm.registry.file_locks import sign_lock, try_lock

DEFAULT_FOLDER = Path("/tmp")
"""Not TMPDIR, which may differ from user to user."""
TURN_SECONDS = 30.0
"""Longest wait for another process's claim, which takes milliseconds."""

_MAX_TEXT = 4096
_MAX_NAME = 80


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may have no name for the user
        return str(os.getuid())


class Claimant(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a claim: one rank of one attempt of a run, in one process."""

    run_id: str
    attempt: str
    rank: int = 0
    pid: int = msgspec.field(default_factory=os.getpid)
    user: str = msgspec.field(default_factory=_user)

    def __str__(self) -> str:
        """A description such as `run demo-1f3a (pid 4711 of ann)`.

        Another user may have written the fields, so characters that control a terminal are removed.
        """
        run_id, user = ("".join(filter(str.isprintable, text))[:_MAX_NAME] for text in (self.run_id, self.user))
        return f"run {run_id} (pid {self.pid} of {user})"


@dataclass(frozen=True)
class ClaimResult:
    """The claimed GPUs; or none, and the `problem`: why there are too few."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


def claim_gpus(
    gpus: Sequence[Gpu],
    needs: Sequence[int],
    claimant: Claimant,
    held: ExitStack,
    folder: Path | None = None,
    clock: Clock = CLOCK,
) -> ClaimResult:
    """Claim the GPUs that one rank of a plan needs, until `held` is closed.

    `needs` is the number of GPUs of each node bundle of the plan. The ranks of an attempt claim in turn, and each one
    takes the largest need that is left; after the last need, further ranks claim nothing.
    """
    if not any(needs):
        return ClaimResult()
    folder = folder or folder_of_this_boot()
    try:
        _make_folder(folder)
        with ExitStack() as turn:
            _take_turn(folder, turn, clock)
            return _claim(gpus, needs, claimant, held, folder)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return ClaimResult(problem=f"cannot claim GPUs in {folder}: {reason}; its owner must remove it")
    except DeadlineError as late:
        return ClaimResult(problem=f"cannot claim GPUs in {folder}: {late}; a process that claims there is stopped")


def missing_gpus(visible: str | None, want: int, folder: Path | None = None) -> str:
    """Why `want` of the GPUs in CUDA_VISIBLE_DEVICES cannot be claimed now; empty if they can.

    The claim is released at once, so a later claim may find fewer.
    """
    nobody = Claimant(run_id="", attempt=secrets.token_hex(8))
    with ExitStack() as held:
        return claim_visible(visible, [want], nobody, held, folder).problem


def claim_visible(
    visible: str | None, needs: Sequence[int], claimant: Claimant, held: ExitStack, folder: Path | None = None
) -> ClaimResult:
    """Claim GPUs of this machine that `visible`, the value of CUDA_VISIBLE_DEVICES, names; None names all."""
    if not any(needs):
        return ClaimResult()
    parts = parts_of_gpus(visible)
    return ClaimResult(problem=parts) if parts else claim_gpus(find_gpus(visible), needs, claimant, held, folder)


def folder_of_this_boot() -> Path:
    """The folder of this machine's claims until its next boot; it differs between machines that share /tmp."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return DEFAULT_FOLDER / f"rollcall-gpus-{boot}"


def _take_turn(folder: Path, turn: ExitStack, clock: Clock) -> None:
    """Hold the claiming lock until `turn` is closed, so that two ranks never split the GPUs that each needs."""
    path = folder / "turn"
    lock = _open(path, turn)
    wait_for("other processes to claim GPUs", partial(try_lock, lock, path), TURN_SECONDS, clock=clock)


def _claim(gpus: Sequence[Gpu], needs: Sequence[int], claimant: Claimant, held: ExitStack, folder: Path) -> ClaimResult:
    """Lock all free GPUs, keep the first ones that are needed, and release the others."""
    with ExitStack() as locks:
        locked = {gpu: _lock(gpu, locks, folder) for gpu in gpus}
        holders = {gpu: holder for gpu, holder in locked.items() if isinstance(holder, Claimant)}
        want = _next_need(needs, _counts(holders.values(), claimant))
        free = {gpu: lock for gpu, lock in locked.items() if isinstance(lock, int) and not gpu.held}
        if len(free) < want:
            return ClaimResult(problem=_shortage(want, len(free), gpus, holders))
        mine = dict(list(free.items())[:want])
        for lock in mine.values():
            sign_lock(lock, msgspec.json.encode(claimant).decode())
            held.callback(os.close, os.dup(lock))  # flock belongs to the open file, not to the descriptor
        return ClaimResult(tuple(mine))


def _lock(gpu: Gpu, locks: ExitStack, folder: Path) -> int | Claimant:
    """The descriptor of a GPU's lock, held until `locks` is closed; or the lock's holder."""
    path = _path(gpu, folder)
    lock = _open(path, locks)
    return lock if try_lock(lock, path) else _read(lock)


def _next_need(needs: Iterable[int], taken: Counter[int]) -> int:
    """The largest need that no other rank has claimed."""
    return max(Counter(needs) - taken, default=0)


def _counts(holders: Iterable[Claimant], claimant: Claimant) -> Counter[int]:
    """The number of ranks of the attempt per number of claimed GPUs: {2: 1} if one rank has two."""
    attempt = (claimant.run_id, claimant.attempt)
    ranks = Counter(holder.rank for holder in holders if (holder.run_id, holder.attempt) == attempt)
    return Counter(ranks.values())


def _shortage(want: int, free: int, gpus: Sequence[Gpu], holders: dict[Gpu, Claimant]) -> str:
    if not gpus:
        return f"{_words(want)} needed; this machine has none, or CUDA_VISIBLE_DEVICES hides them"
    reasons = [f"GPU {gpu.index} is claimed by {holders[gpu]}" if gpu in holders else gpu.held for gpu in gpus]
    why = "; ".join(filter(None, reasons))
    return f"{_words(want)} needed, {free} of {len(gpus)} free{f' ({why})' if why else ''}"


def _words(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def _path(gpu: Gpu, folder: Path) -> Path:
    name = "".join(letter for letter in gpu.uuid if letter.isalnum() or letter == "-")
    return folder / (name or f"index-{gpu.index}")


def _read(lock: int) -> Claimant:
    """The holder that a lock's file names."""
    try:
        return msgspec.json.decode(os.pread(lock, _MAX_TEXT, 0), type=Claimant)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Claimant(run_id="unknown", attempt="", pid=0, user="unknown")


def _open(path: Path, closing: ExitStack) -> int:
    """A descriptor of the lock at this path, closed with `closing`; no child inherits it.

    Without O_CREAT, which the kernel refuses for another user's file in a world-writable folder (fs.protected_regular).
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    if not path.exists():
        _make_lock(path)
    lock = os.open(path, flags)
    closing.callback(os.close, lock)
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        raise OSError(0, f"{path.name} is not a regular file")
    return lock


def _make_lock(path: Path) -> None:
    """Create a lock that every user may take and sign. It is linked to `path` only after its mode is set."""
    temporary = _temporary_name(path)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        temporary.chmod(0o666)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()


def _make_folder(folder: Path) -> None:
    """Create the sticky folder in which every user may add locks; `OSError` if the path is not a directory."""
    if not folder.exists():
        temporary = _temporary_name(folder)
        temporary.mkdir()
        try:
            temporary.chmod(0o1777)
            temporary.rename(folder)
        except OSError:  # another process has created it
            temporary.rmdir()
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise NotADirectoryError(0, "it is not a folder")


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")
