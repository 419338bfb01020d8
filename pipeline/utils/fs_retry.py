"""Retries while a shared filesystem fails.

Defines which errors are transient. `retry_transient` repeats a read or write until a deadline; `DeferredWrites` queues
an agent's writes until the disk accepts them. Other errors are raised at once. Every retry is a heartbeat
(`pipeline.utils.heartbeat`), so that the retrying process is not taken for hung.

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
"""Seconds for which a working process retries: a file server completes a failover within this time."""
FINAL_WRITE_TIMEOUT = 30.0
"""Seconds for which an ending process retries its last write."""

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
    """Whether the same call may succeed later, once the disk has recovered or has room."""
    return error.errno in TRANSIENT


def retry_transient(awaited: str, act: Callable[[], T], seconds: float, clock: Clock = CLOCK) -> T:
    """The result of `act`, retried after transient errors. After `seconds` its last error is raised.

    Callable from any thread. Its heartbeats count for the whole process: retries of a background thread, such as the
    checkpoint thread, hide a stall of the main thread for up to `seconds`.
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
    """A queue of writes that are executed in order, as soon as the disk accepts them.

    writes.submit(lambda: files.write_document(path, document))     # at once, or by a later `flush`
    """

    def __init__(self) -> None:
        self._pending: deque[Callable[[], object]] = deque()

    def submit(self, write: Callable[[], object]) -> None:
        """Execute the write after all earlier ones: now, if the disk accepts them."""
        self._pending.append(write)
        self.flush()

    def flush(self) -> bool:
        """Execute pending writes; True once none is left."""
        while self._pending:
            try:
                self._pending[0]()
            except OSError as error:
                if is_transient(error):
                    return False
                print(f"a write failed and is not tried again: {error}", flush=True)
            self._pending.popleft()
        return True
