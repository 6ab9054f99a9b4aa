"""The machine and the versions of packages of a measurement."""

import datetime
import os
import platform
import sysconfig
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

_PACKAGES = ("dragoman", "numpy", "uvloop", "httptools", "grpcio", "orjson", "msgspec", "scikit-learn")


def machine() -> dict[str, str | int]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "python_build": "optimised" if _optimised() else "not optimised (no --enable-optimizations): a fifth slower",
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _optimised() -> bool:
    """Return whether the interpreter was built with profile-guided optimization, as distributions do."""
    return "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")


def versions(names: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def describe() -> str:
    """Return a description in two lines."""
    m = machine()
    line = f"{m['processor']}, {m['cores']} cores, {m['memory_gib']} GiB, {m['system']}"
    line += f", Python {m['python']}, {m['python_build']}"
    return line + "\n" + ", ".join(f"{name} {version}" for name, version in versions().items())


def busy_cores(seconds: float = 1.0) -> float:
    """Return how many cores are busy; called before a measurement, this is the other load of the machine."""
    before_s, began_s = busy_s(), time.monotonic()
    time.sleep(seconds)
    return round((busy_s() - before_s) / (time.monotonic() - began_s), 2)


def busy_s() -> float:
    """Return the CPU time of all programs: that of all states except idle and waiting for disks."""
    times = [int(n) for n in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")
