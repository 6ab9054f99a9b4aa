"""A signal when the parent process exits."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def signal_on_parent_exit(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent exits. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
