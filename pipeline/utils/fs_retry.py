"""A disk that fails for a while.

Owns which errors of a shared filesystem may pass, and how they are borne: what must be written or read is tried again
until a deadline, and what an agent could not say is kept until it can. Promises that an error which cannot pass is
raised at once, and that who tries again is not taken for hung meanwhile: every try is a beat
(`pipeline.utils.heartbeat`). Knows nothing of what is read and written.

    world = retry_transient("the world to be read", lambda: files.read_document(path, World), seconds=30)
"""

import errno
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from pipeline.utils import heartbeat
from pipeline.utils.waiting import CLOCK, Clock, Deadline, exponential_pauses

T = TypeVar("T")

FS_OUTAGE_TIMEOUT = 120.0
"""For how long a process that is at work bears a disk that fails: a file server that fails over is back by then."""
FINAL_WRITE_TIMEOUT = 30.0
"""For how long somebody who has nothing else to do any more tries to write down its last words."""

TRANSIENT = frozenset(
    {
        *(errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.EINTR),
        *(errno.ENOSPC, errno.EDQUOT, errno.ENOLCK, errno.ENOMEM, errno.ENFILE, errno.EMFILE, errno.ENOBUFS),
        *(errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ESHUTDOWN),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.EPIPE, errno.EPROTO),
    }
)
_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


def is_transient(error: OSError) -> bool:
    """Whether the same call may succeed a little later, without anybody mending anything but the disk."""
    return error.errno in TRANSIENT


def retry_transient(awaited: str, act: Callable[[], T], seconds: float, clock: Clock = CLOCK) -> T:
    """What `act` returns, tried again while it fails for a transient reason; after `seconds` its last error is raised.

    From whatever thread: one beside the work, that of a commit for instance, hides for as long that the work stands
    still.
    """
    deadline, pauses = Deadline(awaited, seconds, clock), exponential_pauses(_PAUSE, _LONGEST_PAUSE)
    while True:
        try:
            return act()
        except OSError as error:
            if not is_transient(error) or deadline.passed:
                raise
        heartbeat.beat()
        clock.sleep(min(next(pauses), deadline.left))


class DeferredWrites:
    """What has to be said on disk, in order, and is kept while the disk takes nothing.

    outbox.say(lambda: files.write_document(path, document))     # at once, or by a later `flush`
    """

    def __init__(self) -> None:
        self._left: deque[Callable[[], object]] = deque()

    def submit(self, write: Callable[[], object]) -> None:
        """Write it when all that was said before is written: now, if the disk takes it."""
        self._left.append(write)
        self.flush()

    def flush(self) -> bool:
        """Try what is left; True once nothing is."""
        while self._left:
            try:
                self._left[0]()
            except OSError as error:
                if is_transient(error):
                    return False
                print(f"cannot be written, and is not tried again: {error}", flush=True)
            self._left.popleft()
        return True
