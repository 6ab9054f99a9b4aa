"""Loads, replaces and unloads models while the others answer."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dragoman.core.calls import IndexEntry
from dragoman.core.errors import AlreadyLoaded, DragomanError, InvalidInput, ModelFailed, NotReady, OutOfMemory
from dragoman.core.peers import Peers
from dragoman.core.spec import ModelSpec
from dragoman.engine.deployment import Deployment
from dragoman.engine.registry import Registry
from dragoman.engine.repository import Repository, Source

log = logging.getLogger("dragoman.engine")

# How many models load at the same time when the server starts, and how long one may take before it has failed.
LOADING_AT_ONCE = 4
_LOAD_TIMEOUT_S = 600.0
# A model that could not be loaded yet is loaded again after 1 s, then 2 s, ...
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class _Loading:
    """Work on a model that is under way, and the versions that are to come of it."""

    task: "asyncio.Task[None]"
    versions: frozenset[str]
    is_retry: bool = False  # the model could not be loaded yet; any other work on it goes first

    def give_up(self) -> None:
        """A second time would interrupt it while it closes what it has loaded."""
        if not self.task.cancelling():
            self.task.cancel()


class Control:
    """What a registry holds, and how that changes. Its work goes on when whoever asked for it has left.

    `changed` is called whenever the readiness of anything may have changed. `peers` gives a model of that name the
    others to ask. `gate` bounds how many models load at the same time when the server starts. `found` is what a scan
    has just given, so that the start reads, and tells of, no file twice.
    """

    def __init__(
        self,
        repository: Repository,
        registry: Registry,
        changed: Callable[[], None],
        peers: Callable[[str], Peers] | None = None,
        gate: asyncio.Semaphore | None = None,
        found: Mapping[str, Source] | None = None,
    ) -> None:
        self._repository = repository
        self._registry = registry
        self._changed = changed
        self._peers = peers
        self._gate = gate or asyncio.Semaphore(LOADING_AT_ONCE)
        self._found = found
        self._gone: dict[str, dict[str, IndexEntry]] = {}  # by name and version; of those that are there none counts
        self._loading: dict[str, _Loading] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._closed = False

    def leave(self) -> None:
        """Load nothing; what the repository has is UNAVAILABLE until somebody loads it."""
        for name, source in self._first().items():
            try:
                versions, why = [spec.version for spec in source.specs()], "not loaded at the start"
            except InvalidInput as fault:  # what is there makes no sense, which is no reason to stop the others
                versions, why = [""], fault.message
            self._remember(name, versions, why)
        self._changed()

    async def start(self) -> None:
        """Load every model of the repository, some at the same time; one that fails is UNAVAILABLE.

        One that raises NotReady, as where a server that it needs is down, is loaded again and again after that.
        """

        async def load(name: str, versions: list[Deployment]) -> None:
            async with self._gate:
                try:
                    await _start_all(name, versions)
                except DragomanError as fault:
                    log.error("%s", fault.message)
            if any(d.retries for d in versions):
                self._owned(name, self._retry(name, versions), [d.spec.version for d in versions], is_retry=True)

        waiting: list[asyncio.Task[None]] = []
        for name, source in self._first().items():
            versions = self._made(source.specs())
            self._registry.put(name, versions, source.default_version)  # LOADING from now on
            waiting.append(self._owned(name, load(name, list(versions.values())), versions))
        try:
            await asyncio.gather(*waiting)
        except asyncio.CancelledError:
            # One whose model was unloaded meanwhile is no reason to stop the others.
            await asyncio.gather(*waiting, return_exceptions=True)
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise

    async def load(self, name: str, version: str = "", url: str = "") -> None:
        """Load a model, or one version of it, or put what is on disk now in its place; it goes on if the caller leaves.
        With a `url`, load what lies there as a new one, whose place is forgotten when it is unloaded.

        Raises InvalidInput where there is no such model, or where it cannot be loaded, OutOfMemory where memory is
        short; the old one stays then. AlreadyLoaded where a new one was to come. NotReady where everything stops.
        """
        source = await asyncio.to_thread(self._sought, name, url or self._url(name))
        await self._settled(name)
        if url and self._registry.versions(name):
            raise AlreadyLoaded(f"model '{name}' is loaded already; unload it to register another by that name")
        versions = self._chosen(name, source, version)
        await self._done(name, self._replace(name, versions, source.default_version, beside=bool(version)), versions)

    async def scale(self, name: str, version: str, replicas: int) -> None:
        """Have so many replicas of a model, or of one version: each is loaded anew with them, to take its own place.

        Raises ModelNotFound, NotSupported where it can have no more than one, and what `load` raises.
        """
        await self._settled(name)
        there = self._registry.there(name, version)
        specs = [d.scaled(replicas) for d in there]
        changed = [spec for spec, d in zip(specs, there, strict=True) if spec is not d.spec]

        async def scaled() -> None:
            for spec in changed:
                made, default = self._made([spec]), self._registry.default(name)
                await self._replace(name, made, default, beside=bool(spec.version))

        await self._done(name, scaled(), [spec.version for spec in changed])

    async def unload(self, name: str, version: str = "") -> None:
        """Drain and drop a model, or one version of it, and give up a load of it. ModelNotFound if not there."""
        loading = self._loading.get(name)
        if loading is not None and (not version or version in loading.versions):
            loading.give_up()
            await asyncio.wait({loading.task})
            if not self._registry.versions(name):  # it was to be the first, so that nothing else is there
                return
        old = self._registry.take(name, version)
        self._remember(name, [d.spec.version for d in old if not d.spec.url], "unloaded")
        self._retire(old)
        self._changed()

    def index(self, *, ready: bool) -> tuple[IndexEntry, ...]:
        """Every model version that is or was there, or those that are ready."""
        states = self.states()
        served = {(e.name, e.version) for e in states}
        gone = (e for versions in self._gone.values() for e in versions.values())
        entries = (*states, *(e for e in gone if (e.name, e.version) not in served))
        return tuple(e for e in entries if not ready or e.state == "READY")

    def states(self) -> tuple[IndexEntry, ...]:
        """Every model version that is there."""
        there = ((d, d.spec) for d in self._registry.all())
        return tuple(IndexEntry(spec.name, spec.version, d.told_state, d.told_reason, spec.url) for d, spec in there)

    async def drain(self) -> None:
        """Wait until every model has answered the calls that it had."""
        await asyncio.gather(*(d.drain() for d in self._registry.all()), *self._retiring)

    async def close(self) -> None:
        """Stop at once."""
        self._closed = True
        for task in self._retiring:
            task.cancel()
        for loading in self._loading.values():
            loading.give_up()
        tasks = [*self._retiring, *(loading.task for loading in self._loading.values())]
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(d.close() for d in self._registry.all()))

    # ----------------------------------------------------------------------------------------------------------

    def _url(self, name: str) -> str:
        """Where the model of that name was registered from, "" where it was not."""
        return self._registry.find(name).spec.url if self._registry.versions(name) else ""

    def _sought(self, name: str, url: str) -> Source:
        """What is at the url now, or without one by that name in the repository."""
        source = self._repository.at(name, url) if url else self._repository.scan().get(name)
        if source is None:
            raise InvalidInput(f"failed to load '{name}', it is not in the repository")
        return source

    async def _settled(self, name: str) -> None:
        """Wait until nothing of that name is being loaded. Raises NotReady where everything stops."""
        while name in self._loading:
            if self._loading[name].is_retry:
                self._loading[name].give_up()
            await asyncio.wait({self._loading[name].task})
        if self._closed:
            raise NotReady("the server is shutting down")

    async def _done(self, name: str, work: Coroutine[object, object, None], versions: Iterable[str]) -> None:
        """Work on the model of that name until it is done, whether or not the caller waits for it."""
        task = self._owned(name, work, versions)
        await asyncio.wait({task})  # unlike awaiting it, leaves it alone when the caller is cancelled
        if task.cancelled():
            raise InvalidInput(f"failed to load '{name}', it was unloaded meanwhile")
        task.result()

    def _first(self) -> Mapping[str, Source]:
        found, self._found = self._found, None
        return self._repository.scan() if found is None else found

    def _made(self, specs: Iterable[ModelSpec]) -> dict[str, Deployment]:
        return {spec.version: Deployment(spec, self._changed, self._peers) for spec in specs}

    def _chosen(self, name: str, source: Source, version: str) -> dict[str, Deployment]:
        """One version, or where none is named every one that is to be served."""
        made = self._made(source.specs())
        if not version:
            return made
        if version not in made:
            there = ", ".join(filter(None, made)) or "it has none"
            raise InvalidInput(f"failed to load '{name}', version '{version}' is not among those to be served: {there}")
        return {version: made[version]}

    def _remember(self, name: str, versions: Iterable[str], why: str) -> None:
        """Remember why versions that the repository has, or had, are not there."""
        for version in versions:
            self._gone.setdefault(name, {})[version] = IndexEntry(name, version, "UNAVAILABLE", why)

    async def _retry(self, name: str, versions: Sequence[Deployment]) -> None:
        """Load those versions again that could not be loaded yet, until each is loaded or has failed for good."""
        delay_s, told = _FIRST_RETRY_S, ""
        while waiting := [d for d in versions if d.retries]:
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_RETRY_S)
            try:
                async with self._gate:
                    await _start_all(name, waiting)
                log.info("model '%s' is loaded at last", name)
            except DragomanError as fault:
                if fault.message != told:
                    log.warning("%s; next attempt in %g s", fault.message, delay_s)
                told = fault.message

    def _owned(
        self,
        name: str,
        work: Coroutine[object, object, None],
        versions: Iterable[str],
        *,
        is_retry: bool = False,
    ) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        loading = self._loading[name] = _Loading(task, frozenset(versions), is_retry)

        def done(_: "asyncio.Task[None]") -> None:
            if self._loading.get(name) is loading:
                del self._loading[name]
            if not task.cancelled():
                fault = task.exception()  # whoever asked may be gone
                if fault is not None:
                    log.error("%s", fault)

        task.add_done_callback(done)
        return task

    async def _replace(self, name: str, versions: dict[str, Deployment], default: str, *, beside: bool) -> None:
        """Load aside, then take the place of what was there, which drains while the new one answers."""
        # One that is registered is told of once it can answer: till then the server is as ready as it was.
        registered = any(d.spec.url for d in versions.values())
        first = not registered and not self._registry.versions(name)
        if first:
            self._registry.put(name, versions, default)
        try:
            await _start_all(name, list(versions.values()))
        except BaseException as fault:
            await asyncio.gather(*(d.close() for d in versions.values()))
            if first and self._registry.versions(name):  # the others are as ready as they were
                self._registry.take(name)
                self._changed()
            self._remember(name, () if registered else versions, str(fault) or "given up")
            if isinstance(fault, ModelFailed) and not isinstance(fault, OutOfMemory):
                raise InvalidInput(fault.message) from fault
            raise
        if not beside:  # all that is on disk has been looked at anew
            self._gone.pop(name, None)
        if not first:
            self._retire(self._registry.put(name, versions, default, beside=beside))
        self._changed()

    def _retire(self, old: Sequence[Deployment]) -> None:
        async def retire(deployment: Deployment) -> None:
            try:
                await deployment.drain()
            finally:
                await deployment.close()

        for deployment in old:
            task = asyncio.get_running_loop().create_task(retire(deployment))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)


async def _start_all(name: str, deployments: list[Deployment]) -> None:
    """Start every version; raises the first fault after all have been tried."""
    try:
        async with asyncio.timeout(_LOAD_TIMEOUT_S):
            results = await asyncio.gather(*(d.start() for d in deployments), return_exceptions=True)
    except TimeoutError as fault:
        raise ModelFailed(f"failed to load '{name}', it was not done after {_LOAD_TIMEOUT_S:.0f} s") from fault
    faults = [r for r in results if isinstance(r, BaseException)]
    if faults:
        raise faults[0]
