"""The environment of this process as other processes see it."""

import sys
from collections.abc import Set
from pathlib import Path

# Of proc(5): the address of the environment, after the name of the process; its end follows.
_ENV_START = 47


def overwrite_variables(names: Set[str]) -> None:
    """Overwrite values in the memory in which the kernel has passed the environment to this process.

    Removing a variable leaves it there, and other processes of the user read it in `/proc/PID/environ`. Linux only.
    """
    if sys.platform != "linux":
        return
    import ctypes  # few commands have secrets

    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
        start, end = int(fields[_ENV_START]), int(fields[_ENV_START + 1])
    except (OSError, ValueError, IndexError):
        return
    at = start  # 0 where the kernel does not tell
    for variable in ctypes.string_at(start, end - start).split(b"\0") if start else ():
        name, _, value = variable.partition(b"=")
        if name.decode(errors="replace") in names:
            ctypes.memset(at + len(name) + 1, ord("*"), len(value))
        at += len(variable) + 1
