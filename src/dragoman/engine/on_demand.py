"""Load models on demand: room for a bounded number of loaded models, and what is unloaded to make room."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable

import msgspec

from dragoman.core.errors import InvalidInput, NotReady
from dragoman.core.metrics import Family, Sample
from dragoman.core.record_calls import KeepLoaded, ListLoaded, LoadedModel
from dragoman.core.spec import ModelSpec
from dragoman.engine.deployment import Deployment
from dragoman.engine.load_counters import LoadCounters
from dragoman.engine.registry import ModelRegistry
from dragoman.settings import Settings

log = logging.getLogger("dragoman.engine")

# After a failed load, calls do not start another one for 1 s, then 2 s, ... up to 60 s.
_FIRST_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_CHECK_INTERVAL_S = 0.1


class NoRoom(NotReady):
    """The model cannot be loaded now, since other loaded models leave no room."""


class _Failures(msgspec.Struct, frozen=True):
    """Failed loads in a row: the delay before the next one, and when it may start, on the monotonic clock."""

    delay_s: float
    next_s: float


class LoadLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the models that are loaded on demand; 0 means no limit.

    max_models, max_bytes: number of loaded model versions, and bytes of their files. wait_s: how long a request waits
    while all that could be unloaded are busy. idle_s: how long a model stays loaded without requests.
    """

    max_models: int = 0
    max_bytes: int = 0
    wait_s: float = 30.0
    idle_s: float = 0.0


def load_limits(settings: Settings) -> LoadLimits | None:
    """Return the limits of loading on demand, None without it. Raises InvalidInput for settings that exclude it."""
    if settings.load_on_demand and not settings.load_at_start:
        raise InvalidInput("setting 'load_on_demand': expected it without --no-load-at-start, got both")
    if not settings.load_on_demand:
        for name in ("max_loaded_models", "max_loaded_bytes", "unload_idle_s"):
            if getattr(settings, name):
                raise InvalidInput(f"setting '{name}': expected 'load_on_demand' with it")
        return None
    return LoadLimits(
        max_models=settings.max_loaded_models,
        max_bytes=settings.max_loaded_bytes,
        wait_s=settings.load_wait_s,
        idle_s=settings.unload_idle_s,
    )


def is_pinned(spec: ModelSpec) -> bool:
    """Return whether a model stays loaded: one that is pinned, or a Python object."""
    return spec.pinned or spec.target is not None


class LoadedModels:
    """The loaded models of a server that loads on demand. The least recently used idle one makes room for another."""

    def __init__(self, limits: LoadLimits) -> None:
        self._limits = limits
        # When each was loaded, on the monotonic clock; also those that are being loaded or unloaded.
        self._loaded: dict[Deployment, float] = {}
        self._unloading: dict[Deployment, asyncio.Task[None]] = {}
        self._failures: dict[Deployment, _Failures] = {}
        self._idle_s: dict[Deployment, float] = {}  # of models for which a client has set it
        self._timers: dict[Deployment, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        self.load_counters = LoadCounters()
        self._unloads: Counter[str] = Counter()

    # --- loading -----------------------------------------------------------------------------------------------

    async def load(self, deployment: Deployment, *, needs_room: bool = True) -> None:
        """Start a deployment once there is room for it. Raises NoRoom, and what starting raises.

        A model that replaces a loaded one needs no room, since the old one serves until the new one is ready.
        """
        if deployment in self._unloading:
            await asyncio.wait({self._unloading[deployment]})
        if needs_room:
            await self._make_room(deployment)
        begin_s = self._loaded[deployment] = time.monotonic()
        try:
            await self.load_counters.start(deployment)
        except BaseException:
            self._loaded.pop(deployment, None)
            delay_s = (
                min(2 * self._failures[deployment].delay_s, _MAX_RETRY_S)
                if deployment in self._failures
                else _FIRST_RETRY_S
            )
            self._failures[deployment] = _Failures(delay_s, time.monotonic() + delay_s)
            raise
        self._failures.pop(deployment, None)
        self._loaded[deployment] = now_s = time.monotonic()
        log.info("model loaded: %s duration_s=%.3f loaded=%d", _label(deployment), now_s - begin_s, len(self._loaded))

    def retry_in_s(self, deployment: Deployment) -> float:
        """Return the seconds for which calls must not load a deployment again, since it failed."""
        failures = self._failures.get(deployment)
        return failures.next_s - time.monotonic() if failures is not None else 0.0

    async def _make_room(self, deployment: Deployment) -> None:
        try:
            async with asyncio.timeout(self._limits.wait_s), self._turn:
                while missing := self._missing(deployment):
                    await self._free(deployment, missing)
                self._loaded[deployment] = time.monotonic()
        except TimeoutError as error:
            raise NoRoom(
                f"model '{deployment.spec.name}' is not ready: no room to load it within {self._limits.wait_s:g} s, "
                "since every model that could be unloaded is busy"
            ) from error

    def _missing(self, deployment: Deployment) -> str:
        """Return the setting that does not allow another model, "" if there is room for it."""
        limits = self._limits
        if limits.max_models and len(self._loaded) >= limits.max_models:
            return f"max_loaded_models = {limits.max_models}"
        total = sum(map(_size, self._loaded)) + _size(deployment)
        if limits.max_bytes and total > limits.max_bytes:
            return f"max_loaded_bytes = {limits.max_bytes}"
        return ""

    async def _free(self, deployment: Deployment, missing: str) -> None:
        """Unload the least recently used idle model, or wait until one may be idle. Raises NoRoom if none ever is."""
        candidates = [d for d in self._loaded if not is_pinned(d.spec)]
        if not candidates:
            raise NoRoom(
                f"model '{deployment.spec.name}' is not ready: {missing} leaves no room: "
                f"{len(self._loaded)} loaded models are pinned, and it has {_size(deployment)} bytes"
            )
        idle = [d for d in candidates if d.state == "READY" and not d.in_flight]
        if idle:
            await asyncio.wait({self._start_unloading(min(idle, key=self._last_used_s), "room")})
            return
        waits = [asyncio.ensure_future(d.wait_until_idle()) for d in candidates if d.in_flight]
        try:
            await asyncio.wait(waits or [asyncio.ensure_future(asyncio.sleep(0))], timeout=_CHECK_INTERVAL_S)
            if not waits:
                await asyncio.sleep(_CHECK_INTERVAL_S)
        finally:
            for wait in waits:
                wait.cancel()

    def _last_used_s(self, deployment: Deployment) -> float:
        return max(self._loaded[deployment], deployment.counters.last_s)

    # --- unloading ---------------------------------------------------------------------------------------------

    def _start_unloading(self, deployment: Deployment, reason: str) -> "asyncio.Task[None]":
        """Unload an idle model. Requests that come from now on load it again."""
        deployment.state = "UNLOADED"
        self._unloads[reason] += 1

        async def unload() -> None:
            try:
                await deployment.unload()
            finally:
                self._loaded.pop(deployment, None)
                self._reset(deployment)
                del self._unloading[deployment]
            log.info("model unloaded: %s reason=%s loaded=%d", _label(deployment), reason, len(self._loaded))

        task = self._unloading[deployment] = asyncio.get_running_loop().create_task(unload())
        return task

    async def remove(self, deployment: Deployment) -> None:
        """Forget a deployment that is closed: it was replaced or removed, or could not be loaded."""
        if deployment in self._unloading:
            await asyncio.wait({self._unloading[deployment]})
        self._failures.pop(deployment, None)
        self._reset(deployment)
        if self._loaded.pop(deployment, None) is not None:
            self._unloads["removed"] += 1

    async def unload_idle(self) -> None:
        """Unload models that have had no request for `idle_s` seconds, until cancelled."""
        while True:
            for deployment in [d for d in self._loaded if d not in self._idle_s and d.state == "READY"]:
                if not deployment.in_flight and self.unload_in_s(deployment) <= 0:
                    self._start_unloading(deployment, "idle")
            await asyncio.sleep(min(self._limits.idle_s / 4, 1.0))

    def keep(self, deployment: Deployment, idle_s: float) -> None:
        """Unload a loaded model after `idle_s` seconds without requests.

        The setting is dropped when the model is unloaded for any reason.
        """
        if deployment.state != "READY" or deployment not in self._loaded or is_pinned(deployment.spec):
            return
        self._reset(deployment)
        self._idle_s[deployment] = idle_s
        if idle_s < math.inf:
            self._timers[deployment] = asyncio.get_running_loop().create_task(self._unload_later(deployment))

    async def _unload_later(self, deployment: Deployment) -> None:
        while deployment.in_flight or self.unload_in_s(deployment) > 0:
            await deployment.wait_until_idle()
            await asyncio.sleep(max(0.0, self.unload_in_s(deployment)))
        if deployment.state == "READY":
            del self._timers[deployment]
            self._start_unloading(deployment, "idle")

    def _reset(self, deployment: Deployment) -> None:
        """Forget what a client has set for a deployment."""
        self._idle_s.pop(deployment, None)
        if (timer := self._timers.pop(deployment, None)) is not None:
            timer.cancel()

    def unload_in_s(self, deployment: Deployment) -> float:
        """Return the seconds until a loaded model is unloaded if there is no further request."""
        idle_s = self._idle_s.get(deployment, self._limits.idle_s or math.inf)
        if is_pinned(deployment.spec) or deployment not in self._loaded:
            return math.inf
        return idle_s - (0.0 if deployment.in_flight else time.monotonic() - self._last_used_s(deployment))

    # --- metrics -----------------------------------------------------------------------------------------------

    def families(self) -> Iterable[Family]:
        name = "dragoman_models_loaded"
        count = sum(d.state == "READY" for d in self._loaded)
        yield Family(name, "gauge", "Loaded model versions.", (Sample(name, {}, count),))
        name = "dragoman_model_unloads_total"
        unloads = tuple(Sample(name, {"reason": r}, self._unloads[r]) for r in ("room", "idle", "removed"))
        yield Family(name, "counter", "Unloaded models by reason.", unloads)


def answer_about_loaded(
    call: KeepLoaded | ListLoaded, name: str, registry: ModelRegistry, loaded: LoadedModels | None
) -> tuple[LoadedModel, ...] | None:
    """Return the answer to a call; `loaded` is None if models are not loaded on demand."""
    if isinstance(call, KeepLoaded):
        if loaded is not None:
            for deployment in registry.select(name):
                loaded.keep(deployment, call.idle_s)
        return None
    loaded_models = []
    for name in registry.names():
        ready = [d for d in registry.select(name) if d.state == "READY"]
        if ready:
            unload_in_s = max(math.inf if loaded is None else loaded.unload_in_s(d) for d in ready)
            loaded_models.append(LoadedModel(name, sum(map(_size, ready)), max(0.0, unload_in_s)))
    return tuple(loaded_models)


def _size(deployment: Deployment) -> int:
    """Return the size in bytes of a model's files."""
    return sum(size for _, _, size, _ in deployment.spec.files)


def _label(deployment: Deployment) -> str:
    version = deployment.spec.version
    return f"model={deployment.spec.name}" + (f" version={version}" if version else "")
