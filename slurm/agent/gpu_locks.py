"""GPUs that the runs of one machine keep for themselves, where no scheduler deals them out.

Owns one lock for each GPU, named by its UUID, in a folder that all users of the machine share. Promises that two
processes that see this folder never claim the same GPU, whoever started them; that a rank gets all the GPUs that it
needs or none; that a claim ends with its process, however that ends; and that a sentence says of each GPU that is not
free who has it. Must not know roles.

    with ExitStack() as held:
        claimed = claim_visible(None, [2, 0], Claimant(run_id="demo-1f3a", attempt="local-0"), held)
        claimed.gpus, claimed.problem       # two of them, and ""

A claim is an agreement among runs, not a guard against other programs: those show by the memory that they hold.
Containers agree if they share /tmp; else CUDA_VISIBLE_DEVICES gives each its own.
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
"""Longest wait while another process claims GPUs, which takes milliseconds."""

_MAX_TEXT = 4096
_MAX_NAME = 80


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container need not know the names of its users
        return str(os.getuid())


class Claimant(msgspec.Struct, frozen=True, kw_only=True):
    """Who claims: one rank of one attempt of a run, in one process."""

    run_id: str
    attempt: str
    rank: int = 0
    pid: int = msgspec.field(default_factory=os.getpid)
    user: str = msgspec.field(default_factory=_user)

    def __str__(self) -> str:
        """As `run demo-1f3a (pid 4711 of ann)`. Anybody may have written it: nothing in it commands a terminal."""
        run_id, user = ("".join(filter(str.isprintable, text))[:_MAX_NAME] for text in (self.run_id, self.user))
        return f"run {run_id} (pid {self.pid} of {user})"


@dataclass(frozen=True)
class ClaimResult:
    """The GPUs that are the claimant's now; or none, and `problem`, which says why there are too few."""

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
    """Claim what one rank of a plan needs, until `held` is closed.

    `needs` is the number of GPUs of each seat of the plan. The ranks of an attempt take them in turn, the greatest
    first; who comes after all seats have theirs needs none.
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
        return ClaimResult(problem=f"cannot claim GPUs in {folder}: {reason}; have it removed by its owner")
    except DeadlineError as late:
        return ClaimResult(problem=f"cannot claim GPUs in {folder}: {late}; a process that claims there is stopped")


def missing_gpus(visible: str | None, want: int, folder: Path | None = None) -> str:
    """Why so many GPUs cannot be claimed now, of those that CUDA_VISIBLE_DEVICES leaves; empty if they can.

    Keeps none: whoever claims later may find fewer.
    """
    nobody = Claimant(run_id="", attempt=secrets.token_hex(8))
    with ExitStack() as held:
        return claim_visible(visible, [want], nobody, held, folder).problem


def claim_visible(
    visible: str | None, needs: Sequence[int], claimant: Claimant, held: ExitStack, folder: Path | None = None
) -> ClaimResult:
    """`claim_gpus` of those GPUs of this machine that `visible`, CUDA_VISIBLE_DEVICES, leaves; all if it is None."""
    if not any(needs):
        return ClaimResult()
    parts = parts_of_gpus(visible)
    return ClaimResult(problem=parts) if parts else claim_gpus(find_gpus(visible), needs, claimant, held, folder)


def folder_of_this_boot() -> Path:
    """Where this machine's claims are until it is started again: no other machine's, should they share their /tmp."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return DEFAULT_FOLDER / f"rollcall-gpus-{boot}"


def _take_turn(folder: Path, turn: ExitStack, clock: Clock) -> None:
    """Be the only one who claims, until `turn` is closed: so those who need several never take them from each other."""
    path = folder / "turn"
    lock = _open(path, turn)
    wait_for("others to claim theirs", partial(try_lock, lock, path), TURN_SECONDS, clock=clock)


def _claim(gpus: Sequence[Gpu], needs: Sequence[int], claimant: Claimant, held: ExitStack, folder: Path) -> ClaimResult:
    """Lock all that are free, keep the first of them that do, and let go of the rest."""
    with ExitStack() as locks:
        found = {gpu: _lock(gpu, locks, folder) for gpu in gpus}
        holders = {gpu: holder for gpu, holder in found.items() if isinstance(holder, Claimant)}
        want = _next_need(needs, _counts(holders.values(), claimant))
        free = {gpu: lock for gpu, lock in found.items() if isinstance(lock, int) and not gpu.held}
        if len(free) < want:
            return ClaimResult(problem=_shortage(want, len(free), gpus, holders))
        mine = dict(list(free.items())[:want])
        for lock in mine.values():
            sign_lock(lock, msgspec.json.encode(claimant).decode())
            held.callback(os.close, os.dup(lock))  # the lock is that of the open file, whichever descriptor it has
        return ClaimResult(tuple(mine))


def _lock(gpu: Gpu, locks: ExitStack, folder: Path) -> int | Claimant:
    """The descriptor of a GPU's lock, taken until `locks` is closed; or who has it."""
    path = _path(gpu, folder)
    lock = _open(path, locks)
    return lock if try_lock(lock, path) else _read(lock)


def _next_need(needs: Iterable[int], taken: Counter[int]) -> int:
    """The greatest need that no other rank has claimed for."""
    return max(Counter(needs) - taken, default=0)


def _counts(holders: Iterable[Claimant], claimant: Claimant) -> Counter[int]:
    """How many GPUs the other ranks of the attempt have: {2: 1} if one of them has two."""
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
    """Who signed a lock."""
    try:
        return msgspec.json.decode(os.pread(lock, _MAX_TEXT, 0), type=Claimant)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Claimant(run_id="unknown", attempt="", pid=0, user="unknown")


def _open(path: Path, closing: ExitStack) -> int:
    """A descriptor of the lock at this path, closed with `closing`; no child inherits it.

    Never opened with O_CREAT: the kernel refuses that for another user's file in a folder that all may write
    (fs.protected_regular).
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    if not path.exists():
        _make_lock(path)
    lock = os.open(path, flags)
    closing.callback(os.close, lock)
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        raise OSError(0, f"{path.name} is no plain file")
    return lock


def _make_lock(path: Path) -> None:
    """Make a lock that anybody may take and sign; beside its place, so that nobody finds it before its mode is set."""
    temporary = _open_beside(path)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        temporary.chmod(0o666)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()


def _make_folder(folder: Path) -> None:
    """Make the folder in which anybody may add locks and nobody remove another's; `OSError` if it is something else."""
    if not folder.exists():
        temporary = _open_beside(folder)
        temporary.mkdir()
        try:
            temporary.chmod(0o1777)
            temporary.rename(folder)
        except OSError:  # another's is there by now
            temporary.rmdir()
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise NotADirectoryError(0, "it is no folder")


def _open_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")
