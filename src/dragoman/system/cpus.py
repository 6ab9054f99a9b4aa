"""How many CPUs this process may use: by its affinity, and by the quotas of its control groups."""

import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

# What libraries of linear algebra read when they are loaded.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Those that `limit_default_threads` has set in this process.
_limited: set[str] = set()


def affinity() -> int:
    """Return the number of CPUs on which this process may run, which libraries take for the number of their threads."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def cores() -> int:
    """Return the number of cores that this process may use: fewer than its CPUs in a container with a CPU limit."""
    return max(1, math.ceil(min(affinity(), cpu_quota())))


def threads_per_replica(replicas: int) -> int:
    """Return the number of threads for each of several replicas of a model: its share of the cores."""
    return max(1, cores() // replicas)


def thread_limit(replicas: int = 1) -> int | None:
    """Return the number of threads of a library in one of several replicas of a model; None: its default is right."""
    share = threads_per_replica(replicas)
    return share if share < affinity() else None


def limit_default_threads() -> None:
    """Let libraries that this process and its children load later start no more threads than there are cores."""
    own = variables_of_threads(os.environ, 1)
    os.environ.update(own)
    _limited.update(own)


def variables_of_threads(environment: Mapping[str, str], replicas: int) -> dict[str, str]:
    """Return the variables that limit the threads of libraries in one of several replicas of a model.

    environment: its variables without them. What the user has set in it stays.
    """
    limit = thread_limit(replicas)
    free = [name for name in _THREAD_VARIABLES if name not in environment or name in _limited]
    return {} if limit is None else dict.fromkeys(free, str(limit))


def cpu_quota(proc: Path = Path("/proc/self")) -> float:
    """Return the CPU time per time that the control groups of this process allow, versions 1 and 2; infinity if all.

    The quotas of a group and of all groups above it hold. proc: the folder of the process.
    """
    if sys.platform != "linux":
        return math.inf
    return min((quota for folder in _folders(proc) for quota in (_quota_1(folder), _quota_2(folder))), default=math.inf)


def _folders(proc: Path) -> Iterator[Path]:
    """Yield the folders of the groups that limit CPU time, from that of the process up to the root that it sees."""
    try:
        groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in (group for group in groups if len(group) == 3):
        if controllers and "cpu" not in controllers.split(","):
            continue
        for fields in mounts:
            # proc(5): fields 4 and 5 are the root of the mount and its place; the type and options follow a hyphen.
            kind, _, options = fields[fields.index("-") + 1 :][:3]
            is_2 = kind == "cgroup2" and not controllers
            if not (is_2 or (kind == "cgroup" and controllers and "cpu" in options.split(","))):
                continue
            top, inside = Path(fields[4]), Path(path)
            # A container may see its own group as the root of the mount, under a path of the host.
            below = inside.relative_to(fields[3]) if inside.is_relative_to(fields[3]) else Path()
            folder = top / below
            yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(top)))


def _quota_1(folder: Path) -> float:
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


def _quota_2(folder: Path) -> float:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max"
        return math.inf
