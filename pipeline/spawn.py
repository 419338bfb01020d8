"""Becomes a role: the few lines between fork and exec.

Run as a script by `pipeline.process`, with the parent's pid and a command. Promises that the process dies when its
agent dies (Linux's parent-death signal), that scheduler signals meant for the agent do not end it (Slurm signals every
process of a step), and that it starts in its own session. Imports nothing of the project.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit("the agent died before its role started")
    for ignored in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
