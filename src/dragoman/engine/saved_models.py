"""Changes of models by clients, in the state store, so that a restart sees the same."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import structs

from dragoman.core.state_store import StateStore

log = logging.getLogger("dragoman.engine")


class SavedAdapter(msgspec.Struct, frozen=True, omit_defaults=True):
    """A LoRA adapter that a client has loaded, from a path in the model's folder of adapters."""

    path: str
    pinned: bool = False


class SavedModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """Changes of one model by clients.

    url: where it was registered from. loaded: versions that are loaded though the server loads none at the start; ""
    for all that are to be served. unloaded: versions that are not loaded. replicas: by version. adapters: by name; None
    for one that was unloaded.
    """

    url: str = ""
    loaded: tuple[str, ...] = ()
    unloaded: tuple[str, ...] = ()
    replicas: Mapping[str, int] = {}
    adapters: Mapping[str, SavedAdapter | None] = {}

    def is_wanted(self, version: str, *, at_start: bool) -> bool:
        """Return whether a version is loaded at the start. at_start: whether the settings say so."""
        is_loaded = at_start or bool(self.url) or "" in self.loaded or version in self.loaded
        return is_loaded and version not in self.unloaded


_UNCHANGED = SavedModel()


class SavedModels:
    """The changes of each model, as of the last start and since."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._table = store.table("models")
        self._by_name: dict[str, SavedModel] = {name: row for (_, name), row in self._table.read(SavedModel).items()}

    def of(self, name: str) -> SavedModel:
        """Return the changes of a model."""
        return self._by_name.get(name, _UNCHANGED)

    def names(self) -> Iterable[str]:
        """Return the models that were changed."""
        return [*self._by_name]

    def change(self, name: str, **fields: Any) -> None:
        """Note changes of a model, as fields of `SavedModel`; they are written soon."""
        changed = structs.replace(self.of(name), **fields)
        if changed == _UNCHANGED:
            if self._by_name.pop(name, None) is not None:
                self._table.delete(name)
        elif changed != self.of(name):
            self._by_name[name] = changed
            self._table.put(name, changed)

    def forget(self, name: str) -> None:
        """Forget the changes of a model."""
        self.change(name, **structs.asdict(_UNCHANGED))

    async def flush(self, name: str, change: str, instead: str) -> None:
        """Wait until a change is kept. If it cannot be, log that it ends with the server, and how to keep it."""
        if not await self._table.flush():
            log.info("model '%s': %s until the server ends; to keep that, use --state or %s", name, change, instead)
