"""Memory and use of the GPUs of this machine, by NVML through the package `nvidia-ml-py` where it is installed."""

import importlib.util
import logging
import threading
from collections.abc import Iterable
from typing import Any, Final

from dragoman.core.metrics import Family, Kind, Sample

log = logging.getLogger("dragoman.server")
_METRICS: Final[tuple[tuple[str, Kind, str], ...]] = (
    ("dragoman_gpu_memory_used_bytes", "gauge", "Memory of a GPU in use, by all processes."),
    ("dragoman_gpu_memory_total_bytes", "gauge", "Memory of a GPU."),
    ("dragoman_gpu_utilization_ratio", "gauge", "Fraction of the last second in which a GPU was busy."),
)


class Gpus:
    """The GPUs of this machine. The driver is opened once; if it or a GPU cannot be read, its metrics are missing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nvml: Any = None
        self._is_open = False

    def families(self) -> Iterable[Family]:
        """Return the metrics of each GPU; none without the package or a GPU. Call it in a thread."""
        with self._lock:
            if not self._is_open:
                self._is_open, self._nvml = True, _open()
            found = [] if self._nvml is None else _read(self._nvml)
        return [
            Family(name, kind, line, tuple(Sample(name, labels, values[i]) for labels, values in found))
            for i, (name, kind, line) in enumerate(_METRICS)
        ]


def _open() -> Any:
    """Return the package with an open driver, None without one."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # another package of this name may raise anything
        log.info("no metrics of GPUs: %s", error)
        return None
    return pynvml


def _read(nvml: Any) -> list[tuple[dict[str, str], tuple[float, float, float]]]:
    found = []
    for number in range(nvml.nvmlDeviceGetCount()):
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(number)
            memory, rates = nvml.nvmlDeviceGetMemoryInfo(device), nvml.nvmlDeviceGetUtilizationRates(device)
            labels = {"gpu": str(number), "uuid": str(nvml.nvmlDeviceGetUUID(device))}
        except nvml.NVMLError as error:  # such as a part of a GPU, which has no utilization
            log.debug("no metrics of GPU %d: %s", number, error)
            continue
        found.append((labels, (float(memory.used), float(memory.total), rates.gpu / 100)))
    return found
