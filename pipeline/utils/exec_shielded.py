"""Becomes a role: the few lines between fork and exec.

Run as a script by `pipeline.utils.subprocesses`, with the parent's pid and a command. Promises that the process dies
when its agent dies (Linux's parent-death signal), that no signal of the scheduler reaches it or anything below it
(Slurm signals every process of a step, also those with a session of their own), and that INT, with which the agent asks
it to end, is as deliverable as in a shell. Imports nothing of the project.

The shield is the signal mask and not `SIG_IGN`: a program that sets a handler, as every server does, undoes the latter,
while a blocked signal stays blocked through fork and exec until somebody unblocks it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
SHIELDED = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP})
"""What schedulers send to every process of a job. It is for the agent alone."""


def main() -> None:
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit("the agent died before its role started")
    signal.pthread_sigmask(signal.SIG_SETMASK, SHIELDED)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it, and so would the role
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
