"""LoRA adapters of a model: load and unload them while the model generates, within memory limits."""

import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dragoman.core.errors import AlreadyLoaded, InvalidInput, ModelFailed, Overloaded, PathNotFound
from dragoman.generation.adapters import read_adapter
from dragoman.generation.engine import GenerationEngine

_NAME = re.compile(r"[A-Za-z0-9._-](?:[A-Za-z0-9._/-]{0,126}[A-Za-z0-9._-])?")
# Loading waits for the end of the current step.
_STEP_S = 60.0
_MAX_KNOWN = 10_000


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of LoRA adapters.

    max_adapters: number of adapters in memory. adapter_memory: MiB of their files. max_adapter_rank: rank of one.
    """

    max_adapters: int
    adapter_memory: int
    max_adapter_rank: int


@dataclass(eq=False, slots=True)
class _Adapter:
    """A known adapter, whose weights may be in memory.

    key: name of its weights in the engine; a new one each time the weights are read.
    uses: number of calls that need the weights.
    """

    name: str
    folder: Path
    size: int
    is_pinned: bool
    key: str = ""
    in_memory: bool = False
    uses: int = 0
    used_s: float = field(default_factory=time.monotonic)


class AdapterStore:
    """Adapters by name. Those that are not in memory are loaded again when a call needs them.

    root: only adapters in this folder can be loaded by clients. names: sorted names, updated in place.
    """

    def __init__(self, root: Path, limits: AdapterLimits) -> None:
        self.names: list[str] = []
        self.service: Any = None  # an `AsyncEngine`, once it exists
        self._root, self._limits = root, limits
        self._adapters: dict[str, _Adapter] = {}
        self._in_memory: dict[str, _Adapter] = {}  # by key, also those that were replaced and are still used
        self._generation = 0
        self._lock = threading.Lock()  # protects the fields above; held only briefly
        self._loading = threading.Lock()

    # --- management --------------------------------------------------------------------------------------

    def load_initial(self, folders: Iterable[tuple[str, Path]], engine: GenerationEngine) -> None:
        """Load adapters before calls are accepted, in the engine's thread. Raises ModelFailed for invalid ones."""
        for name, folder in folders:
            self._add(self._adapter(name, folder, is_pinned=False), lambda function: function(engine), is_new=True)

    def load(self, name: str, path: str, *, replaces: bool = False, is_pinned: bool = False) -> None:
        """Load an adapter from a path in the root folder; blocks until it is in memory.

        Raises AlreadyLoaded, PathNotFound for a path that does not exist, InvalidInput for adapters that are invalid or
        do not fit the model, and Overloaded if there is no room.
        """
        if not _NAME.fullmatch(name):
            raise InvalidInput(f"`lora_name` must be 1 to 128 letters, digits or . _ / -; got {name[:140]!r}")
        if name in self._adapters and not replaces:
            raise AlreadyLoaded(f"the adapter '{name}' is already loaded")
        if len(self._adapters) >= _MAX_KNOWN and name not in self._adapters:
            raise Overloaded(f"expected at most {_MAX_KNOWN} adapters")
        folder = self._resolve(path)
        try:
            self._add(self._adapter(name, folder, is_pinned=is_pinned), self._execute, is_new=True)
        except ModelFailed as error:
            raise InvalidInput(error.message) from error

    def unload(self, name: str) -> None:
        """Forget an adapter; calls that use it are completed. Raises PathNotFound."""
        with self._lock:
            adapter = self._adapters.pop(name, None)
            if adapter is None:
                raise PathNotFound(f"the adapter '{name[:128]}' is not loaded")
            self.names[:] = sorted(self._adapters)
        self._drop_unused()

    # --- calls -------------------------------------------------------------------------------------------

    def try_acquire(self, name: str) -> str | None:
        """Return the key of an adapter in memory, which stays there until `release`; None if it must be loaded first.

        Raises InvalidInput if there is no such adapter.
        """
        with self._lock:
            adapter = self._adapters.get(name)
            if adapter is None:
                raise InvalidInput(
                    f"adapter: unknown adapter '{name[:128]}', expected one of {', '.join(self.names) or 'none'}"
                )
            if not adapter.in_memory:
                return None
            adapter.uses += 1
            adapter.used_s = time.monotonic()
            return adapter.key

    def acquire(self, name: str) -> str:
        """Return the key of an adapter as `try_acquire`, after loading it if necessary; blocks meanwhile."""
        while (key := self.try_acquire(name)) is None:
            adapter = self._adapters.get(name)
            if adapter is not None:
                try:
                    self._add(adapter, self._execute, is_new=False)
                except ModelFailed as error:
                    raise InvalidInput(error.message) from error
        return key

    def release(self, key: str) -> None:
        with self._lock:
            self._in_memory[key].uses -= 1
        self._drop_unused()

    # ------------------------------------------------------------------------------------------------------

    def _adapter(self, name: str, folder: Path, *, is_pinned: bool) -> _Adapter:
        try:
            size = (folder / "adapter_model.safetensors").stat().st_size
        except OSError as error:
            raise ModelFailed(f"adapter '{name}' cannot be read: no adapter_model.safetensors") from error
        return _Adapter(name, folder, size, is_pinned)

    def _resolve(self, path: str) -> Path:
        """Return a folder below the root. Raises InvalidInput, or PathNotFound if it does not exist."""
        root = self._root.resolve()
        try:
            folder = (root / path).resolve()
            exists = folder.is_dir()
        except (OSError, ValueError):
            raise InvalidInput("`lora_path` must be the path of a folder") from None
        if not path or root not in folder.parents:
            raise InvalidInput("`lora_path` must be a folder in the folder of adapters (adapter_folder)")
        if not exists:
            raise PathNotFound("`lora_path`: folder not found in the folder of adapters")
        return folder

    def _add(
        self, adapter: _Adapter, execute: Callable[[Callable[[GenerationEngine], None]], None], *, is_new: bool
    ) -> None:
        """Load weights into memory, making room for them; a new adapter replaces one of the same name."""
        with self._loading:
            if adapter.in_memory or not (is_new or self._adapters.get(adapter.name) is adapter):
                return  # another call has loaded, replaced or unloaded it meanwhile
            memory = self._limits.adapter_memory << 20
            if adapter.size > memory:
                raise ModelFailed(
                    f"adapter '{adapter.name}' is too large: expected at most {self._limits.adapter_memory} MiB "
                    f"(adapter_memory), got {-(-adapter.size >> 20)} MiB"
                )
            weights = read_adapter(adapter.name, adapter.folder, self._limits.max_adapter_rank)
            for other in self._choose_evictions(adapter):
                execute(partial(_remove, other.key))
            self._generation += 1
            adapter.key = f"{adapter.name}:{self._generation}"
            execute(lambda engine: engine.add_adapter(adapter.key, weights))
            with self._lock:
                adapter.in_memory = True
                self._in_memory[adapter.key] = adapter
                if is_new:
                    self._adapters[adapter.name] = adapter
                    self.names[:] = sorted(self._adapters)
        self._drop_unused()

    def _choose_evictions(self, adapter: _Adapter) -> list[_Adapter]:
        """Return adapters to remove from memory: the one that is replaced, then the least recently used ones.

        Raises Overloaded if that is not enough.
        """
        with self._lock:
            inside = sorted(self._in_memory.values(), key=lambda each: (each.name != adapter.name, each.used_s))
            count, size = len(inside) + 1, adapter.size + sum(each.size for each in inside)
            evicted = []
            for each in inside:
                if count <= self._limits.max_adapters and size <= self._limits.adapter_memory << 20:
                    break
                if not each.uses and (not each.is_pinned or each.name == adapter.name):
                    evicted.append(each)
                    count, size = count - 1, size - each.size
            if count > self._limits.max_adapters or size > self._limits.adapter_memory << 20:
                raise Overloaded(
                    f"no room for the adapter '{adapter.name}': all {len(inside)} in memory are pinned or in use"
                )
            for each in evicted:
                each.in_memory = False
                del self._in_memory[each.key]
        return evicted

    def _drop_unused(self) -> None:
        """Remove weights that were unloaded or replaced and are no longer used."""
        with self._lock:
            unused = [
                each for each in self._in_memory.values() if not each.uses and self._adapters.get(each.name) is not each
            ]
            for each in unused:
                del self._in_memory[each.key]
        for each in unused:
            if self.service is not None:
                self.service.execute(partial(_remove, each.key))

    def _execute(self, function: Callable[[GenerationEngine], None]) -> None:
        future: Future[None] = self.service.execute(function)
        future.result(_STEP_S)


def _remove(key: str, engine: GenerationEngine) -> None:
    engine.remove_adapter(key)
