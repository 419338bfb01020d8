"""The script that turns a forked child into a role: the few lines between fork and exec.

`pipeline.utils.subprocesses` runs it with the parent's pid, a limit of open files and a command.
Guarantees for the role:

- The kernel kills it when its agent exits (Linux's parent-death signal).
- No signal of the scheduler reaches it or its descendants. Slurm signals every process of a step, in any session.
- INT, the agent's request to end, has its default action.
- Its soft limit of open files is the given one: a parent that raised its own passes on the limit that it inherited,
  since a program may use select(), or close every number below the limit.

The shield is the signal mask, not `SIG_IGN`. A program that sets a handler, as every server does, replaces `SIG_IGN`,
while a blocked signal stays blocked through fork and exec until a program unblocks it. Imports nothing of the project.
"""

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
SHIELDED = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP})
"""Signals that schedulers send to every process of a job. Only the agent handles them."""


def main() -> None:
    parent, open_files, *command = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # the agent ended before prctl took effect: no death signal will come
        sys.exit("the agent exited before its role started")
    signal.pthread_sigmask(signal.SIG_SETMASK, SHIELDED)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts background jobs with INT ignored: do not inherit this
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(open_files), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
