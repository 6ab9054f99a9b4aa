"""Load, replace and unload models while others answer."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dragoman.core.calls import IndexEntry
from dragoman.core.errors import AlreadyLoaded, DragomanError, InvalidInput, ModelFailed, NotReady, OutOfMemory
from dragoman.core.sibling_models import SiblingModels
from dragoman.core.spec import ModelSpec
from dragoman.engine.deployment import Deployment
from dragoman.engine.registry import ModelRegistry
from dragoman.engine.repository import Repository, Source

log = logging.getLogger("dragoman.engine")

# How many models load at the same time when the server starts, and how long one may take before it has failed.
LOADING_AT_ONCE = 4
_LOAD_TIMEOUT_S = 600.0
# A model that could not be loaded yet is loaded again after 1 s, then 2 s, ...
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class _Loading:
    """A load in progress, and the versions that it will bring."""

    task: "asyncio.Task[None]"
    versions: frozenset[str]
    is_retry: bool = False  # the model could not be loaded yet; any other work on it goes first

    def give_up(self) -> None:
        """Cancel it, once: a second cancellation would interrupt the closing of what it has loaded."""
        if not self.task.cancelling():
            self.task.cancel()


class ModelControl:
    """Changes the content of a registry. A change continues if its caller disconnects.

    `changed` is called whenever the readiness of anything may have changed. `siblings` gives a model access to
    the others. `gate` limits how many models load at a time at the start. `found` is the result of a repository
    scan, if there was one.
    """

    def __init__(
        self,
        repository: Repository,
        registry: ModelRegistry,
        changed: Callable[[], None],
        siblings: Callable[[str], SiblingModels] | None = None,
        gate: asyncio.Semaphore | None = None,
        found: Mapping[str, Source] | None = None,
    ) -> None:
        self._repository = repository
        self._registry = registry
        self._changed = changed
        self._siblings = siblings
        self._gate = gate or asyncio.Semaphore(LOADING_AT_ONCE)
        self._found = found
        self._gone: dict[str, dict[str, IndexEntry]] = {}  # by name and version; of those that are there none counts
        self._loading: dict[str, _Loading] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._closed = False

    def leave(self) -> None:
        """Load nothing; the models of the repository are UNAVAILABLE until they are loaded."""
        for name, source in self._first().items():
            try:
                versions, why = [spec.version for spec in source.specs()], "not loaded at the start"
            except InvalidInput as error:  # what is there makes no sense, which is no reason to stop the others
                versions, why = [""], error.message
            self._remember(name, versions, why)
        self._changed()

    async def start(self) -> None:
        """Load every model of the repository, some concurrently; a model that fails is UNAVAILABLE.

        A model that raises NotReady, e.g. because a server that it needs is down, is loaded again later.
        """

        async def load(name: str, versions: list[Deployment]) -> None:
            async with self._gate:
                try:
                    await _start_all(name, versions)
                except DragomanError as error:
                    log.error("%s", error.message)
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
        """Load a model, or one version of it, or reload it from disk.

        With a `url`, register the model at that path.

        Raises InvalidInput if there is no such model or it cannot be loaded and OutOfMemory; the old version
        stays then. AlreadyLoaded for a `url` if the name is in use. NotReady if the server is shutting down.
        """
        source = await asyncio.to_thread(self._sought, name, url or self._url(name))
        await self._settled(name)
        if url and self._registry.versions(name):
            raise AlreadyLoaded(f"model '{name}' is loaded already; unload it to register another by that name")
        versions = self._chosen(name, source, version)
        await self._done(name, self._replace(name, versions, source.default_version, beside=bool(version)), versions)

    async def scale(self, name: str, version: str, replicas: int) -> None:
        """Set the number of replicas of a model or version: each is loaded anew and then replaced.

        Raises ModelNotFound, NotSupported if it can have only one, and the errors of `load`.
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
        """Drain and remove a model or version, and cancel a load of it. Raises ModelNotFound."""
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
        """Return every known model version, or those that are ready."""
        states = self.states()
        served = {(e.name, e.version) for e in states}
        gone = (e for versions in self._gone.values() for e in versions.values())
        entries = (*states, *(e for e in gone if (e.name, e.version) not in served))
        return tuple(e for e in entries if not ready or e.state == "READY")

    def states(self) -> tuple[IndexEntry, ...]:
        """Return every served model version."""
        there = ((d, d.spec) for d in self._registry.all())
        return tuple(
            IndexEntry(spec.name, spec.version, d.reported_state, d.reported_reason, spec.url) for d, spec in there
        )

    async def drain(self) -> None:
        """Wait until every model has answered its calls in flight."""
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
        """Return where the model was registered from, or ""."""
        return self._registry.find(name).spec.url if self._registry.versions(name) else ""

    def _sought(self, name: str, url: str) -> Source:
        """Return the source at a url, or by name in the repository."""
        source = self._repository.at(name, url) if url else self._repository.scan().get(name)
        if source is None:
            raise InvalidInput(f"failed to load '{name}', it is not in the repository")
        return source

    async def _settled(self, name: str) -> None:
        """Wait until no load of this model is in progress. Raises NotReady if the server is shutting down."""
        while name in self._loading:
            if self._loading[name].is_retry:
                self._loading[name].give_up()
            await asyncio.wait({self._loading[name].task})
        if self._closed:
            raise NotReady("the server is shutting down")

    async def _done(self, name: str, work: Coroutine[object, object, None], versions: Iterable[str]) -> None:
        """Run a change of the model to its end, even if the caller is cancelled."""
        task = self._owned(name, work, versions)
        await asyncio.wait({task})  # unlike awaiting it, leaves it alone when the caller is cancelled
        if task.cancelled():
            raise InvalidInput(f"failed to load '{name}', it was unloaded meanwhile")
        task.result()

    def _first(self) -> Mapping[str, Source]:
        found, self._found = self._found, None
        return self._repository.scan() if found is None else found

    def _made(self, specs: Iterable[ModelSpec]) -> dict[str, Deployment]:
        return {spec.version: Deployment(spec, self._changed, self._siblings) for spec in specs}

    def _chosen(self, name: str, source: Source, version: str) -> dict[str, Deployment]:
        """Return one version, or without a version every one to be served."""
        made = self._made(source.specs())
        if not version:
            return made
        if version not in made:
            there = ", ".join(filter(None, made)) or "it has none"
            raise InvalidInput(f"failed to load '{name}', version '{version}' is not among those to be served: {there}")
        return {version: made[version]}

    def _remember(self, name: str, versions: Iterable[str], why: str) -> None:
        """Remember why versions of the repository are not served."""
        for version in versions:
            self._gone.setdefault(name, {})[version] = IndexEntry(name, version, "UNAVAILABLE", why)

    async def _retry(self, name: str, versions: Sequence[Deployment]) -> None:
        """Load versions again that were not ready, until each is loaded or has failed."""
        delay_s, told = _FIRST_RETRY_S, ""
        while waiting := [d for d in versions if d.retries]:
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_RETRY_S)
            try:
                async with self._gate:
                    await _start_all(name, waiting)
                log.info("model '%s' is loaded at last", name)
            except DragomanError as error:
                if error.message != told:
                    log.warning("%s; next attempt in %g s", error.message, delay_s)
                told = error.message

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
                error = task.exception()  # whoever asked may be gone
                if error is not None:
                    log.error("%s", error)

        task.add_done_callback(done)
        return task

    async def _replace(self, name: str, versions: dict[str, Deployment], default: str, *, beside: bool) -> None:
        """Load new versions, then replace the old ones, which drain while the new ones answer."""
        # One that is registered is told of once it can answer: till then the server is as ready as it was.
        registered = any(d.spec.url for d in versions.values())
        first = not registered and not self._registry.versions(name)
        if first:
            self._registry.put(name, versions, default)
        try:
            await _start_all(name, list(versions.values()))
        except BaseException as error:
            await asyncio.gather(*(d.close() for d in versions.values()))
            if first and self._registry.versions(name):  # the others are as ready as they were
                self._registry.take(name)
                self._changed()
            self._remember(name, () if registered else versions, str(error) or "given up")
            if isinstance(error, ModelFailed) and not isinstance(error, OutOfMemory):
                raise InvalidInput(error.message) from error
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
    """Start every version; raise the first error after all have been tried."""
    try:
        async with asyncio.timeout(_LOAD_TIMEOUT_S):
            results = await asyncio.gather(*(d.start() for d in deployments), return_exceptions=True)
    except TimeoutError as error:
        raise ModelFailed(f"failed to load '{name}', it was not done after {_LOAD_TIMEOUT_S:.0f} s") from error
    faults = [r for r in results if isinstance(r, BaseException)]
    if faults:
        raise faults[0]
