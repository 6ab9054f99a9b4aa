"""Options of the whole process: allocator, garbage collection, limit of open files, switch interval of threads.

Only programs call this that own their process: the command line and server processes.
"""

import asyncio
import ctypes
import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Set
from contextlib import suppress
from pathlib import Path

# malloc.h: number of the option, environment variable with the same meaning, and value.
_MALLOC_OPTIONS = (
    (-1, "MALLOC_TRIM_THRESHOLD_", 1 << 30),
    (-2, "MALLOC_TOP_PAD_", 16 << 20),
    (-3, "MALLOC_MMAP_THRESHOLD_", 32 << 20),  # the maximum in glibc
)
# More open files than any server needs; some programs iterate over all numbers up to the limit.
_MAX_OPEN_FILES = 1 << 16
_SWITCH_INTERVAL_S = 0.0005
_GC_INTERVAL_S = 0.5
# Python 3.11: 700, 10, 10. The last one is in intervals: a full collection stops the event loop for 6 us per idle
# connection, so there is at most one in a minute.
_GC_THRESHOLDS = (20_000, 20, 120)
# A full collection also comes if nothing else causes one: the garbage of failed calls may hold their tensors.
_GC_FULL_INTERVAL_S = 60.0
# A framework has more modules than this. PyTorch and transformers have 3,000, and 400,000 objects: a full collection
# would look at them for half a second, in which the event loop stops.
_MANY_MODULES = 300
_frozen_modules = 0  # number of modules when objects were last exempted from garbage collection; 0: never
_has_exempt_models = False  # whether objects of models may have been exempted with those of a framework
# The share of the time that full collections may take.
_GC_SHARE = 0.001


def keep_freed_memory(environment: MutableMapping[str, str] | None = None) -> bool:
    """Keep freed memory in this process and, by environment variables, in its child processes.

    By default glibc returns large blocks to the kernel, and page faults of the next request of that size cost more than
    anything else for a tensor of 600 KB. Variables that the operator has set are not changed. Return whether the C
    library supports it; only glibc does.
    """
    environment = os.environ if environment is None else environment
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl, for example
        return False
    is_supported = True
    for option, name, value in _MALLOC_OPTIONS:
        if name not in environment:
            environment[name] = str(value)
            is_supported = bool(mallopt(option, value)) and is_supported
    return is_supported


def raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard limit; return it, or 0 if there is none.

    Systems keep the soft limit at 1024 for programs that use `select`, and expect others to raise it.
    """
    if sys.platform == "win32":
        return 0
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return soft


def open_files_limit() -> int:
    """Return how many files this process may open; 0 if there is no limit."""
    if sys.platform == "win32":
        return 0
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if soft == resource.RLIM_INFINITY else soft


def has_open_device(prefix: str) -> bool:
    """Return whether this process has opened a device whose path begins so; False if the system does not report it."""
    folder = "/proc/self/fd"
    with suppress(OSError):
        for descriptor in os.listdir(folder):
            with suppress(OSError):  # that of the folder is closed
                if os.readlink(f"{folder}/{descriptor}").startswith(prefix):
                    return True
    return False


def explain_temporary_folder(error: OSError) -> str:
    """Return why there is no folder for temporary files, and what to do about it."""
    return (
        f"no folder for temporary files can be written ({error.strerror or error}): mount a writable one at /tmp, such "
        "as a tmpfs or an emptyDir, or name one with TMPDIR"
    )


def shorten_switch_interval() -> None:
    """Let threads that parse large requests release the interpreter lock to the event loop sooner."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def collect_rarely() -> None:
    """Exempt the modules and other objects that exist from garbage collection, and collect others less often.

    Otherwise each full collection stops the event loop to look at all 60,000 of them. With thousands of streams, whose
    objects live until the next token, Python's own thresholds take a quarter of the CPU time.
    """
    global _has_exempt_models
    _has_exempt_models = False
    _freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    gc.enable()


def _freeze() -> None:
    global _frozen_modules
    _frozen_modules = len(sys.modules)
    gc.freeze()


def freeze_imports() -> None:
    """Exempt a framework that was just imported, too, before the objects of the model exist that is loaded with it.

    Without effect in processes that have not called `collect_rarely`.
    """
    global _has_exempt_models
    if _frozen_modules and len(sys.modules) > _frozen_modules + _MANY_MODULES:
        _has_exempt_models = True  # of other models
        _freeze()


async def collect_regularly(find_models: Callable[[], Set[object]], delay_s: float) -> None:
    """Collect young garbage also while few objects are created, and all of it `delay_s` after a model was unloaded.

    The objects of a few calls, and a model, may hold GBs of arrays. `find_models` returns what is loaded in this
    process now. All garbage is collected once in a minute too, except objects that are exempt. Where models are loaded
    again and again, a full collection waits until a thousand times the duration of the last one has passed: with
    thousands of connections each stops the event loop for tens of milliseconds.
    """
    models, due_s, not_before_s = find_models(), list[float](), -math.inf
    regular_s = time.monotonic() + _GC_FULL_INTERVAL_S
    while True:
        await asyncio.sleep(_GC_INTERVAL_S)
        before, now_s = models, time.monotonic()
        models = find_models()
        if before - models:
            due_s.append(now_s + delay_s)
        if now_s <= max(min([regular_s, *due_s]), not_before_s):
            gc.collect(1)
            continue
        # A collection of all objects, those of modules too, stops the event loop for 45 ms, of the others for 2 ms.
        is_of_all = _has_exempt_models and bool(due_s) and min(due_s) < now_s
        due_s, regular_s = [each for each in due_s if now_s <= each], now_s + _GC_FULL_INTERVAL_S
        began_s = time.thread_time()
        if is_of_all:
            gc.unfreeze()
        gc.collect(2)
        if is_of_all:
            _freeze()
        not_before_s = now_s + (time.thread_time() - began_s) / _GC_SHARE


_Usage = tuple[float, float]  # CPU seconds and bytes of resident memory
_USAGE_AGE_S = 1.0


class GroupUsage:
    """CPU time and memory of process groups, such as those of worker processes with the programs that they start.

    All are read at once, at most once in a second: that blocks for 20 us for each process of the machine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._usage: dict[int, _Usage] = {}
        self._read_s = -math.inf

    def read(self) -> Mapping[int, _Usage]:
        """Return user and system CPU seconds, and bytes of resident memory, by group; nothing if it is not reported."""
        with self._lock:
            if time.monotonic() - self._read_s >= _USAGE_AGE_S:
                self._usage, self._read_s = _read_groups(), time.monotonic()
            return self._usage


def _read_groups() -> dict[int, _Usage]:
    groups: dict[int, _Usage] = {}
    if sys.platform != "linux":
        return groups
    tick_s, page = 1 / os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):  # it has ended
                fields = _stat_fields(name)
                group = int(fields[2])
                cpu_s, resident = groups.get(group, (0.0, 0.0))
                # With that of children that have ended, so that the sum does not fall.
                ticks = sum(map(int, fields[11:15]))
                groups[group] = cpu_s + ticks * tick_s, resident + int(fields[21]) * page
    return groups


def _stat_fields(process: str) -> list[str]:
    """Return the fields of proc(5) that follow the name of the command, which may contain blanks and parentheses."""
    with open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()


def resource_usage() -> dict[str, float]:
    """Return CPU time, memory, open files and start time of this process, by the names of Prometheus' libraries.

    Values that the system does not report are missing.
    """
    usage = {"process_cpu_seconds_total": time.process_time(), "process_max_fds": float(open_files_limit())}
    try:
        fields = _stat_fields("self")
        ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        boot_s = next(float(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if "btime" in line)
        usage["process_virtual_memory_bytes"] = float(fields[20])
        usage["process_resident_memory_bytes"] = float(fields[21]) * page
        usage["process_start_time_seconds"] = boot_s + float(fields[19]) / ticks
        usage["process_open_fds"] = float(len(os.listdir("/proc/self/fd")))
    except (OSError, ValueError, StopIteration):  # not Linux
        pass
    return usage
