"""Load, replace and unload models while others answer."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from dragoman import plugins
from dragoman.core import errors
from dragoman.core.audit import log_change
from dragoman.core.callers import ANYONE
from dragoman.core.calls import IndexEntry
from dragoman.core.errors import AlreadyLoaded, DragomanError, InvalidInput, ModelFailed, NotReady, OutOfMemory
from dragoman.core.metrics import Family, Sample
from dragoman.core.spec import ModelSpec, SiblingModels
from dragoman.core.state_store import StateStore
from dragoman.core.usage import UsageMeter
from dragoman.engine.deployment import Deployment
from dragoman.engine.load_counters import LoadCounters
from dragoman.engine.model_changes import ModelChanges
from dragoman.engine.on_demand import LoadedModels, is_pinned
from dragoman.engine.placements import PreferredPlacements
from dragoman.engine.registry import ModelRegistry, is_current
from dragoman.engine.repository import ModelOnDisk, Repository, Source
from dragoman.engine.saved_models import SavedModels
from dragoman.engine.saved_weights import SavedWeights
from dragoman.engine.sent_models import SentModels
from dragoman.engine.statistics import index_entry, without_reasons
from dragoman.engine.version_routing import VersionRouting

log = logging.getLogger("dragoman.engine")

LOADING_AT_ONCE = 4  # models, when the server starts
# A model that raised NotReady is loaded again after 1 s, then 2 s, ... up to 30 s.
_FIRST_RETRY_S, _MAX_RETRY_S = 1.0, 30.0


class ModelControl:
    """Changes the content of a registry. A change continues if its caller disconnects.

    on_change: called whenever readiness may have changed. siblings: gives a model access to the other ones.
    gate: limits how many models load concurrently at the start.
    sources: the result of a repository scan, if there was one.
    loads_new_models: whether models that appear on disk are loaded.
    loaded_models: makes room for models that calls load; None if they are loaded at the start.
    saved_weights, saved_models: the version weights that clients have set, and their other changes.
    meter: counts what keys use.
    """

    def __init__(
        self,
        repository: Repository,
        registry: ModelRegistry,
        on_change: Callable[[], None],
        siblings: Callable[[str], SiblingModels] | None = None,
        gate: asyncio.Semaphore | None = None,
        sources: Mapping[str, Source] | None = None,
        *,
        loads_new_models: bool = True,
        loaded_models: LoadedModels | None = None,
        saved_weights: SavedWeights | None = None,
        saved_models: SavedModels | None = None,
        meter: UsageMeter | None = None,
    ) -> None:
        self._repository = repository
        self._sent = SentModels(repository)
        self._registry = registry
        self._on_change = on_change
        self._siblings = siblings
        self._placements = PreferredPlacements()
        self._gate = gate or asyncio.Semaphore(LOADING_AT_ONCE)
        self._sources = sources
        self._loads_new_models = loads_new_models
        self._loads_at_start = True
        self._loaded_models = loaded_models
        self._saved_weights = saved_weights or SavedWeights()
        self.saved_models = saved_models or SavedModels(StateStore())
        self.load_counters = LoadCounters() if loaded_models is None else loaded_models.load_counters
        self._meter = meter
        self._failed_updates: set[str] = set()  # models that are not served as they are on disk, or were sent
        self.on_disk: dict[str, ModelOnDisk] = {}  # as the models of the repository were read last
        self._unserved: dict[str, dict[str, IndexEntry]] = {}  # by name and version; ignored for those in the registry
        self._changes = ModelChanges()
        self._retiring: set[asyncio.Task[None]] = set()

    def _list(self, name: str, state: ModelOnDisk) -> None:
        """List the versions of a model that is not loaded; an invalid model does not affect the others."""
        self.on_disk[name] = state
        self._registry.note_dialects({name: state.specs})
        self._record_unserved(name, [s.version for s in state.specs] or [""], state.error or "not loaded at the start")

    def _registered_sources(self) -> Iterator[tuple[str, Source]]:
        """Yield the models that clients have registered by URL, as far as they still can be."""
        for name in self.saved_models.names():
            if url := self.saved_models.of(name).url:
                try:
                    yield name, self._repository.at(name, url)
                except DragomanError as error:
                    log.error("model '%s': registered by a client, and not loaded: %s", name, error.message)
                    self._record_unserved(name, [""], error.message)

    def _wanted_specs(self, name: str, specs: Sequence[ModelSpec], *, at_start: bool) -> list[ModelSpec]:
        """Return the versions to load, with the replicas that a client has set; list the others."""
        saved = self.saved_models.of(name)
        wanted = []
        for spec in specs:
            if saved.is_wanted(spec.version, at_start=at_start):
                wanted.append(replace(spec, replicas=saved.replicas.get(spec.version, spec.replicas)))
            else:
                reason = "unloaded" if spec.version in saved.unloaded else "not loaded at the start"
                self._record_unserved(name, [spec.version], reason)
        return wanted

    async def start(self, *, loads_all: bool = True) -> None:
        """Load every model of the repository, some concurrently; a model that fails is UNAVAILABLE.

        Without `loads_all` only those are loaded that clients have loaded before a restart, and the others are
        UNAVAILABLE until they are loaded.

        Models whose framework has to be imported, which can take many seconds, are loaded after the others. A model
        that raises NotReady, e.g. because a server that it needs is down, is loaded again later.
        """

        async def load(name: str, versions: list[Deployment]) -> None:
            async with self._gate:
                try:
                    await self._start_all(versions, needs_room=False)
                except DragomanError as error:
                    log.error("%s", error.message, extra={"unloadable": name})
            await self._check_routing(name, self._registry.by_version(name))
            if any(d.retries for d in versions):
                numbers = [d.spec.version for d in versions]
                self._changes.start(name, self._retry(name, versions), numbers, is_retry=True)

        to_load: list[tuple[str, list[Deployment]]] = []
        self._loads_at_start = loads_all
        on_disk = self._initial_sources()
        for name, source in {**on_disk, **dict(self._registered_sources())}.items():
            is_own = name in on_disk and not self.saved_models.of(name).url
            # The start ends with the error of a model that is served and cannot be read; others are listed with theirs.
            state = ModelOnDisk(tuple(source.specs()), source.routing) if is_own and loads_all else source.state()
            if is_own:
                self.on_disk[name] = state
            self._registry.note_dialects({name: state.specs})
            if state.error:
                self._record_unserved(name, [""], state.error)
            specs = self._wanted_specs(name, state.specs, at_start=loads_all)
            if not specs:
                continue
            weighted = {*self._saved_weights.versions(name)} - {spec.version for spec in state.specs}
            others = [spec for spec in source.all_specs() if spec.version in weighted] if weighted else []
            versions = self._deployments([*specs, *others])
            routing = self._saved_weights.restore(name, source.routing, versions)
            self._registry.put(name, versions, routing)  # LOADING from now on
            at_start = [d for d in versions.values() if not d.loads_on_demand]
            if at_start:
                to_load.append((name, at_start))
        to_load.sort(key=lambda each: any(_imports_framework(d.spec) for d in each[1]))
        tasks = [
            self._changes.start(name, load(name, versions), [d.spec.version for d in versions]).task
            for name, versions in to_load
        ]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:  # also if a model was unloaded meanwhile, which does not affect the others
            await asyncio.gather(*tasks, return_exceptions=True)
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise

    async def load(
        self, name: str, version: str = "", url: str = "", version_weights: str | None = None, *sent: Any
    ) -> None:
        """Load or reload a model, or one version of it; with a `url`, register the model at that path.

        With `version_weights` only these are changed, once the version is loaded, if there is one. They stay until the
        whole model is loaded again. `sent`: `config` and `files` of the call `Load`. Raises ModelNotFound, NotReady,
        InvalidInput, Forbidden, AlreadyLoaded, OutOfMemory (the old version stays).
        """
        if version_weights:
            self._saved_weights.check_allowed()
        if version_weights is not None and not version:
            await self._changes.wait(name)
            self._registry.select(name)
            self._registry.set_routing(name, self._registry.routing(name).override(version_weights))
            self._on_change()
            await self._saved_weights.save(name, self._registry.routing(name))
            return
        registered_from = next((d.spec.url for d in self._registry.by_version(name).values()), "")
        find = partial(self._find_source, name, url or registered_from)
        async with self._sent.source(name, find, *sent) as source:
            await self._changes.wait(name)
            if url and self._registry.versions(name):
                raise AlreadyLoaded(f"model '{name}' is loaded already; unload it to register another with that name")
            routing, before = source.routing, self._registry.routing(name)
            if version and before.is_override:
                routing = before
            if version_weights is not None:
                routing = routing.override(version_weights)
                routing.check_versions(name, {*self._registry.versions(name), version})
            versions = self._select_versions(name, self._read_specs(name, source), version)
            replacing = self._replace(name, versions, routing, keep_others=bool(version))
            await self._changes.run(name, replacing, versions)
            self._note_load(name, version, url or registered_from, is_sent=any(sent))
            await self._saved_weights.save(name, self._registry.routing(name))
            if url:
                await self.saved_models.flush(name, "registered", "put it into a served folder")
            elif not self._loads_at_start:
                await self.saved_models.flush(name, "loaded", "serve it without --no-load-at-start")

    async def scale(self, name: str, version: str, replicas: int) -> None:
        """Set the number of replicas of a model or version, whose deployments are replaced by new ones.

        Raises ModelNotFound, NotSupported if it can have only one, and the errors of `load`.
        """
        await self._changes.wait(name)
        deployments = self._registry.select(name, version)
        specs = [d.scaled_spec(replicas) for d in deployments]
        changed = [spec for spec, d in zip(specs, deployments, strict=True) if spec is not d.spec]

        async def replace() -> None:
            for spec in changed:
                new, routing = self._deployments([spec]), self._registry.routing(name)
                await self._replace(name, new, routing, keep_others=bool(spec.version))

        await self._changes.run(name, replace(), [spec.version for spec in changed])
        if changed:
            before = self.saved_models.of(name).replicas
            self.saved_models.change(name, replicas={**before, **dict.fromkeys([s.version for s in changed], replicas)})
            await self.saved_models.flush(name, f"{replicas} replicas", "set replicas in its dragoman.toml")

    async def unload(self, name: str, version: str = "", *, may_be_unknown: bool = False) -> None:
        """Drain and remove a model or version, and cancel a load of it.

        Raises ModelNotFound if it is not loaded, unless `may_be_unknown` and its dialect allow that.
        """
        is_loading, cancelled = False, set[str]()
        while (change := self._changes.get(name)) and (not version or version in change.versions):
            is_loading = True
            cancelled |= {*change.versions}
            change.cancel()
            await asyncio.wait({change.task})  # another load may have started then
        if is_loading and not self._registry.versions(name):  # it was the first load of this model
            await self._keep_unloaded(name, version, cancelled)
            return
        loaded = self._registry.by_version(name)
        is_loaded = version in loaded if version else bool(loaded)
        if may_be_unknown and not is_loaded and self._registry.dialect_of(name).unloads_unknown:
            return
        old = self._registry.remove(name, version)
        self._failed_updates.discard(name)
        self._record_unserved(name, [d.spec.version for d in old if not d.spec.url], "unloaded")
        self._retire(old)
        self._on_change()
        await self._saved_weights.save(name, self._registry.routing(name))
        await self._keep_unloaded(name, version, [d.spec.version for d in old])

    def _note_load(self, name: str, version: str, url: str, *, is_sent: bool) -> None:
        """Note what a load request has loaded, for the next start; files that a client has sent are not kept."""
        before = self.saved_models.of(name)
        is_kept = not (self._loads_at_start or url or is_sent)
        loaded = tuple(dict.fromkeys([*before.loaded, version])) if is_kept else ()
        if version:
            left = tuple(each for each in before.unloaded if each != version)
            replicas = {each: count for each, count in before.replicas.items() if each != version}
            self.saved_models.change(name, url=url, loaded=loaded, unloaded=left, replicas=replicas)
        else:
            self.saved_models.forget(name)
            self.saved_models.change(name, url=url, loaded=loaded)

    async def _keep_unloaded(self, name: str, version: str, versions: Iterable[str]) -> None:
        """Keep versions unloaded at the next start; a registered model is forgotten."""
        before = self.saved_models.of(name)
        if before.url or name not in self.on_disk:
            self.saved_models.forget(name)
            return
        removed = {*versions}
        self.saved_models.change(
            name,
            loaded=tuple(each for each in before.loaded if version and each != version),
            unloaded=tuple(sorted({*before.unloaded, *removed})),
            replicas={each: count for each, count in before.replicas.items() if each not in removed},
            adapters={},
        )
        await self.saved_models.flush(name, "unloaded", "take it out of the served folders")

    def can_update(self, name: str) -> bool:
        """Return False while the model is loaded or another change of it is in progress. Cancels a pending retry."""
        loading = self._changes.get(name)
        if loading is not None and loading.is_retry:
            loading.cancel()
        return loading is None

    def update(self, name: str, state: ModelOnDisk | None) -> None:
        """Start to serve a model as it is on disk now; None if it was removed from there.

        Versions that have not changed stay, others are replaced once the new ones are loaded. If one cannot be
        loaded, the old ones stay, with the reason in the index. Models that were registered by URL stay, too.
        """
        before = self.on_disk.pop(name, None)
        current = self._registry.by_version(name)
        if not self.saved_models.of(name).url:  # what is on disk now replaces the changes of clients
            self.saved_models.forget(name)
        if state is None and not any(d.spec.url for d in current.values()):
            log.info("model '%s': removed from disk", name)
            was = self._registry.state_of(name)
            self._failed_updates.discard(name)
            self._unserved.pop(name, None)
            self._retire(self._registry.remove(name) if current else [])
            self._log_change_of_files("unload", name, was)
            self._on_change()
        if state is None:
            return
        self.on_disk[name] = state
        if any(d.spec.url for d in current.values()):
            log.warning("model '%s': not loaded from disk: a client has loaded another one with that name", name)
        elif state.error:
            self.load_counters.failed += 1
            self._record_failure(name, [spec.version for spec in before.specs] if before else [""], state.error, ())
            log.error("model '%s': %s", name, state.error)
        elif not (current or self._loads_new_models):
            self._list(name, state)
        else:
            old = {spec.version: spec for spec in before.specs} if before else {}
            kept = {s.version: current[s.version] for s in state.specs if is_current(current.get(s.version), s, old)}
            new = self._deployments(spec for spec in state.specs if spec.version not in kept)
            routing = state.routing
            if (override := self._registry.routing(name)).is_override and {*override.weights} <= {*kept, *new}:
                routing = override  # a client has set the weights
            log.info("model '%s': changed on disk", name)
            if all(d.loads_on_demand for d in new.values()) and not any(d.state == "READY" for d in current.values()):
                self._unserved.pop(name, None)
                self._failed_updates.discard(name)
                was = self._registry.state_of(name)
                self._retire(self._registry.put(name, {**kept, **new}, routing))  # the next call loads it
                self._log_change_of_files("unload", name, was)
                self._on_change()
                return
            self._record_unserved(name, new, "", "LOADING")
            self._changes.start(name, self._update(name, new, routing, kept), new)

    async def _update(
        self, name: str, new: Mapping[str, Deployment], routing: VersionRouting, kept: Mapping[str, Deployment]
    ) -> None:
        action, was = "reload" if self._registry.versions(name) else "load", self._registry.state_of(name)
        try:
            async with self._gate:
                await self._replace(name, new, routing, kept=kept, is_announced=False)
        except BaseException as error:
            self._log_change_of_files(action, name, was, error)
            if isinstance(error, NotReady):  # it may load later: it counts as changed
                self.on_disk.pop(name, None)
            raise
        log.info("model '%s': serves the files on disk", name)
        await self._saved_weights.save(name, self._registry.routing(name))
        self._log_change_of_files(action, name, was)

    def _log_change_of_files(self, action: str, name: str, before: str, error: BaseException | None = None) -> None:
        fields = {"model": name, "cause": "files", "before": before}
        log_change(action, ANYONE, fields if error else {**fields, "after": self._registry.state_of(name)}, error)

    def index(self, *, ready: bool) -> tuple[IndexEntry, ...]:
        """Return every known model version, or those that are ready."""
        states = self.states()
        served = {(e.name, e.version) for e in states}
        unserved = (e for versions in self._unserved.values() for e in versions.values())
        entries = (*states, *(e for e in unserved if (e.name, e.version) not in served))
        return tuple(e for e in entries if not ready or e.state == "READY")

    def states(self, *, has_reasons: bool = True) -> tuple[IndexEntry, ...]:
        """Return every served model version."""
        entries = map(index_entry, self._registry.all())
        return tuple(entries if has_reasons else map(without_reasons, entries))

    def families(self) -> Iterable[Family]:
        """Return the metrics of loads, and of models whose last change has failed while they may serve as before."""
        yield from self.load_counters.families()
        name = "dragoman_model_update_failed"
        names = sorted({*self._registry.names(), *self._failed_updates})
        samples = tuple(Sample(name, {"model": model}, float(model in self._failed_updates)) for model in names)
        yield Family(name, "gauge", "1 if the last load or update of a model has failed.", samples)

    async def drain(self) -> None:
        """Wait until every model has answered its calls in flight."""
        await asyncio.gather(*(d.drain() for d in self._registry.all()), *self._retiring)

    async def close(self) -> None:
        """Stop at once."""
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, *self._changes.close(), return_exceptions=True)
        await asyncio.gather(*map(self._discard, self._registry.all()))

    def _find_source(self, name: str, url: str) -> Source:
        """Return the source at a url, or of this name in the repository."""
        source = self._repository.at(name, url) if url else self._repository.scan().get(name)
        if source is None:
            skipped = [f"; {file.file}: {file.reason}" for file in self._repository.skipped if file.is_of(name)]
            raise errors.ModelNotFound(self._registry.dialect_of(name).unknown_to_load(name) + "".join(skipped[:1]))
        return source

    def _read_specs(self, name: str, source: Source) -> Sequence[ModelSpec]:
        """Return the versions of a model on disk. Raises what reading them raises, which counts as a failed load."""
        try:
            return source.specs()
        except DragomanError as error:
            self.load_counters.failed += 1
            self._record_failure(name, (), error.message, ())
            raise

    def _initial_sources(self) -> Mapping[str, Source]:
        sources, self._sources = self._sources, None
        return self._repository.scan() if sources is None else sources

    def _deployments(self, specs: Iterable[ModelSpec]) -> dict[str, Deployment]:
        """Return new deployments of versions, which calls load if models are loaded on demand."""
        by_version = {}
        for spec in specs:
            load = None if self._loaded_models is None or is_pinned(spec) else self._load_for_call
            arguments = spec, self._on_change, self._siblings, load, self._placements, self._meter
            by_version[spec.version] = Deployment(*arguments)
        return by_version

    def _select_versions(self, name: str, specs: Iterable[ModelSpec], version: str) -> dict[str, Deployment]:
        """Return new deployments of one version, or without a version of every one that is to be served."""
        by_version = {spec.version: spec for spec in specs}
        if not version:
            return self._deployments(by_version.values())
        if version not in by_version:
            served = ", ".join(filter(None, by_version)) or "it has none"
            raise InvalidInput(
                f"failed to load '{name}', version '{version}' is not among those to be served: {served}"
            )
        return self._deployments([by_version[version]])

    def _record_unserved(self, name: str, versions: Iterable[str], reason: str, state: str = "UNAVAILABLE") -> None:
        """Record why versions of the repository are not served."""
        for version in versions:
            self._unserved.setdefault(name, {})[version] = IndexEntry(name, version, state, reason)

    async def _retry(self, name: str, versions: Sequence[Deployment]) -> None:
        """Load versions again that raised NotReady, until each is loaded or has failed."""
        delay_s, logged = _FIRST_RETRY_S, ""
        while waiting := [d for d in versions if d.retries]:
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_RETRY_S)
            try:
                async with self._gate:
                    await self._start_all(waiting, needs_room=False)
                await self._check_routing(name, self._registry.by_version(name))
                log.info("model '%s': loaded after a retry", name)
            except DragomanError as error:
                if error.message != logged:
                    log.warning("%s; next attempt in %g s", error.message, delay_s)
                logged = error.message

    async def _check_routing(self, name: str, versions: Mapping[str, Deployment]) -> None:
        """Make the versions of a model unavailable if some that share requests have different interfaces."""
        try:
            self._registry.routing(name).check_compatible(versions)
        except InvalidInput as error:
            log.error("%s", error.message)
            for deployment in versions.values():
                deployment.reason = error.message
                await deployment.close()

    async def _replace(
        self,
        name: str,
        versions: Mapping[str, Deployment],
        routing: VersionRouting,
        *,
        keep_others: bool = False,
        kept: Mapping[str, Deployment] = MappingProxyType({}),
        is_announced: bool = True,
    ) -> None:
        """Load new versions, then replace the old ones except `kept`, which drain while the new ones answer.

        Until a model is loaded for the first time the server is not ready, except if the model is not announced.
        """
        self._sent.hold(d.spec for d in versions.values())  # a change that is cancelled before it starts holds nothing
        is_registered = any(d.spec.url for d in versions.values())
        is_first = is_announced and not is_registered and not self._registry.versions(name)
        if is_first:
            self._registry.put(name, dict(versions), routing)
        try:
            is_update = any(d.state == "READY" for d in self._registry.by_version(name).values())
            await self._start_all(list(versions.values()), needs_room=not is_update)
            others = self._registry.by_version(name) if keep_others else kept
            routing.check_compatible({**others, **versions})
        except BaseException as error:
            await asyncio.gather(*map(self._discard, versions.values()))
            if is_first and self._registry.versions(name):  # restore the readiness of the server
                self._registry.remove(name)
                self._on_change()
            unchanged = (*kept, *(v for v in self._registry.versions(name) if keep_others and v not in versions))
            self._record_failure(name, () if is_registered else versions, str(error) or "cancelled", unchanged)
            if isinstance(error, ModelFailed) and not isinstance(error, OutOfMemory):
                raise InvalidInput(error.message) from error
            raise
        if not keep_others:  # every version on disk is loaded now, or not to be served
            self._unserved.pop(name, None)
        self._failed_updates.discard(name)
        for deployment in kept.values():
            deployment.update_error = ""
        if not is_first:
            self._retire(self._registry.put(name, {**kept, **versions}, routing, keep_others=keep_others))
        self._on_change()

    def _record_failure(self, name: str, versions: Collection[str], reason: str, unchanged: Collection[str]) -> None:
        """Show in the index and in the metrics that versions are not served, or not as they are on disk."""
        if versions or self._registry.versions(name):  # else it is no model of the server: a client has named it
            self._failed_updates.add(name)
        self._record_unserved(name, versions, reason)
        for deployment in self._registry.by_version(name).values():
            if deployment.spec.version not in unchanged:
                deployment.update_error = reason

    async def _start_all(self, deployments: list[Deployment], *, needs_room: bool) -> None:
        """Start every version; raise the first error after all have been tried."""

        def start(deployment: Deployment) -> Coroutine[Any, Any, None]:
            if self._loaded_models is None:
                return self.load_counters.start(deployment)
            return self._loaded_models.load(deployment, needs_room=needs_room)

        for result in await asyncio.gather(*map(start, deployments), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _close(self, deployment: Deployment) -> None:
        if self._loaded_models is not None:
            await self._loaded_models.remove(deployment)
        await deployment.close()

    async def _discard(self, deployment: Deployment) -> None:
        """Close a deployment that is not used again."""
        try:
            await self._close(deployment)
        finally:
            self._sent.release(deployment.spec)

    # --- loading on demand -------------------------------------------------------------------------------------

    async def _load_for_call(self, deployment: Deployment) -> None:
        """Load a deployment for a call; calls at the same time share one load. Raises NotReady if it fails.

        After a failed load, calls do not start another one for some time.
        """
        name, version = deployment.spec.name, deployment.spec.version
        while deployment.state != "READY":
            loading = self._changes.get(name)
            if not deployment.loads_on_demand:
                raise NotReady(f"model '{name}' is unloading")
            if loading is None:
                assert self._loaded_models is not None
                if (wait_s := self._loaded_models.retry_in_s(deployment)) > 0:
                    raise NotReady(
                        f"{deployment.not_ready().message}; next attempt in {wait_s:.1f} s", max(1.0, wait_s)
                    )
                loading = self._changes.start(name, self._load_checked(deployment), [version])
            await asyncio.wait({loading.task})
            if version not in loading.versions:
                continue
            if loading.task.cancelled():
                raise NotReady(f"model '{name}' is unloading")
            if (error := loading.task.exception()) is not None:
                is_ours = isinstance(error, NotReady) and deployment.state != "UNAVAILABLE"  # such as no room for it
                raise error if is_ours else deployment.not_ready()

    async def _load_checked(self, deployment: Deployment) -> None:
        """Load a deployment unless it differs from the versions with which it shares requests."""
        name = deployment.spec.name
        async with self._gate:
            await self._start_all([deployment], needs_room=True)
        try:
            self._registry.routing(name).check_compatible(self._registry.by_version(name))
        except InvalidInput as error:
            deployment.reason = error.message
            await self._close(deployment)
            raise

    def _retire(self, old: Sequence[Deployment]) -> None:
        async def retire(deployment: Deployment) -> None:
            try:
                await deployment.drain()
            finally:
                await self._discard(deployment)

        for deployment in old:
            task = asyncio.get_running_loop().create_task(retire(deployment))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)


def _imports_framework(spec: ModelSpec) -> bool:
    return plugins.has("runtimes", spec.runtime) and bool(plugins.runtime(spec.runtime).packages)
