"""A pytest plugin (`-p tests.workers`) that lets files of tests that wait run beside files that compute.

The files in `WAITING` spend most of their time in Slurm's delays and in leases. In one queue with all others they would
occupy every worker while the cores idle, and leave the computing to the end. So the first `WAITERS` workers begin with
these files and the other workers with the others. Who finds nothing left of its kind takes the last file of the others,
which is the shortest: a worker holds it back while it still runs the last test of its own.

A file stays on one worker, as with `--dist loadfile`. Files begin in the order of their tests.
"""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling
    from xdist.workermanage import WorkerController

WAITING = ("tests/cluster/", "tests/protocol/")
"""Alone, none of their files keeps more than half a core busy, and most less than a fifth."""
WAITERS = 2
WORKERS = 2 + WAITERS
"""Files of tests that run at a time: on two cores, two that compute."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "Scheduling":
    """The scheduler of the module's rule, for the process that has the workers."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _assign_work_unit(self, node: "WorkerController") -> None:
            waiter = int(node.gateway.id.removeprefix("gw")) < WAITERS
            mine = (file for file in self.workqueue if file.startswith(WAITING) == waiter)
            self.workqueue.move_to_end(next(mine, next(reversed(self.workqueue))), last=False)
            super()._assign_work_unit(node)

        def _reschedule(self, node: "WorkerController") -> None:
            """As late as possible: a worker asks for the test after the one that it is to run, and for no other."""
            if node.shutting_down or not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return Scheduler(config, log)
