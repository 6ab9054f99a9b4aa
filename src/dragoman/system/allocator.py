"""Keep freed memory of large requests in the process.

glibc returns large blocks to the kernel when they are freed, and page faults at the next request of that size
cost more than anything else for a tensor of 600 KB.
"""

import ctypes
import os
import sys
from collections.abc import MutableMapping

# malloc.h: the option's number, the environment variable that means the same, and the value.
_OPTIONS = (
    (-1, "MALLOC_TRIM_THRESHOLD_", 1 << 30),
    (-2, "MALLOC_TOP_PAD_", 16 << 20),
    (-3, "MALLOC_MMAP_THRESHOLD_", 32 << 20),  # the most that glibc takes
)


def keep(environment: MutableMapping[str, str] | None = None) -> bool:
    """Keep freed memory in this process and, by environment variables, in its child processes.

    Variables that the operator has set are not changed. Return whether the C library supports it; only glibc does.
    """
    environment = os.environ if environment is None else environment
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl, for one
        return False
    taken = True
    for option, name, value in _OPTIONS:
        if name not in environment:
            environment[name] = str(value)
            taken = bool(mallopt(option, value)) and taken
    return taken
