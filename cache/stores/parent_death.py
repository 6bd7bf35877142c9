"""Runs a program that dies with its parent: `parent_death.py PARENT_PID PROGRAM ARGUMENTS...`.

Run by its path (`python -I -S`), so it imports nothing of the project. The signal comes when the *thread*
that started this process ends (prctl(2), PR_SET_PDEATHSIG); it is kept across `execv`.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the call
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
