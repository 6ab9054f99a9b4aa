"""LoRA adapters of a model: load and unload them while the model generates, within memory limits.

A call runs when all its adapters are in memory; until it ends they stay there. A call whose adapters are not all in
memory waits in a queue, in order of arrival; the first of them chooses the adapters that make room for its own. Those
that are in use take no further calls, which wait behind it, so that they become free however many calls they get.
Calls that run never wait, and only the first of the queue holds adapters while it does, so no two wait for each other.

| an adapter is | its calls |
|---|---|
| in memory | run |
| in memory and leaving | run to their end; new ones wait |
| not in memory | wait until it is loaded |
"""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dragoman.core.errors import AlreadyLoaded, InvalidInput, ModelFailed, Overloaded, PathNotFound
from dragoman.system.threads import call_in_thread
from dragoman_text.generation.adapters import read_adapter
from dragoman_text.generation.engine import GenerationEngine
from dragoman_text.generation.input_processor import unknown_adapter

log = logging.getLogger("dragoman.generation")

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
    uses: number of calls that need the weights. is_leaving: it takes no further calls until it has made room.
    """

    name: str
    folder: Path
    size: int
    is_pinned: bool
    key: str = ""
    in_memory: bool = False
    uses: int = 0
    is_leaving: bool = False
    used_s: float = field(default_factory=time.monotonic)


class AdapterStore:
    """Adapters by name. Those that are not in memory are loaded again when a call needs them.

    root: only adapters in this folder can be loaded by clients. names: sorted names, updated in place. skipped: why an
    adapter was not loaded at the start, by name.
    """

    def __init__(self, root: Path, limits: AdapterLimits) -> None:
        self.names: list[str] = []
        self.skipped: dict[str, str] = {}
        self.service: Any = None  # an `AsyncEngine`, once it exists
        self._root, self._limits = root, limits
        self._adapters: dict[str, _Adapter] = {}
        self._in_memory: dict[str, _Adapter] = {}  # by key, also those that were replaced and are still used
        self._generation = 0
        self._lock = threading.Lock()  # protects the fields above; held only briefly
        self._loading = threading.Lock()
        self._queue = asyncio.Lock()  # first come, first served
        self._waiting: Callable[[], object] | None = None  # wakes the first call of the queue

    # --- management --------------------------------------------------------------------------------------

    def load_initial(self, folders: Iterable[tuple[str, Path]], engine: GenerationEngine) -> None:
        """Load adapters before calls are accepted, in the engine's thread; invalid ones are skipped."""
        for name, folder in folders:
            try:
                self._add(self._adapter(name, folder, is_pinned=False), lambda function: function(engine), is_new=True)
            except ModelFailed as error:
                log.warning("an adapter is skipped: adapter=%s reason=%s", name, error.message)
                self.skipped[name] = error.message

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
        self.skipped.pop(name, None)

    def unload(self, name: str) -> None:
        """Forget an adapter; calls that use it are completed. Raises PathNotFound."""
        with self._lock:
            adapter = self._adapters.pop(name, None)
            if adapter is None:
                raise PathNotFound(f"the adapter '{name[:128]}' is not loaded")
            self.names[:] = sorted(self._adapters)
        self._drop_unused()
        self._wake()

    # --- calls -------------------------------------------------------------------------------------------

    async def acquire(self, names: Sequence[str]) -> dict[str, str]:
        """Return the keys of adapters in memory, which stay there until `release`; waits until they are.

        Raises AdapterNotFound for an unknown one, InvalidInput for one that no longer fits or for more than there may
        be in memory, and Overloaded if pinned ones leave no room.
        """
        if len(names) > self._limits.max_adapters:
            limit = self._limits.max_adapters
            raise InvalidInput(
                f"adapter: expected at most {limit} adapters (max_adapters) in a request, got {len(names)}"
            )
        keys = self._try_acquire(names)
        if keys is None:
            async with self._queue:
                keys = await self._wait_for(names)
        return keys

    def release(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._in_memory[key].uses -= 1
        self._drop_unused()
        self._wake()

    def _try_acquire(self, names: Iterable[str]) -> dict[str, str] | None:
        """Return the keys if all the adapters are in memory and none is leaving."""
        with self._lock:
            adapters = [self._known(name) for name in names]
            if not all(each.in_memory and not each.is_leaving for each in adapters):
                return None
            return {each.name: self._use(each) for each in adapters}

    def _known(self, name: str) -> _Adapter:
        adapter = self._adapters.get(name)
        if adapter is None:
            raise unknown_adapter(name, self.names, self.skipped)
        return adapter

    @staticmethod
    def _use(adapter: _Adapter) -> str:
        adapter.uses += 1
        adapter.used_s = time.monotonic()
        return adapter.key

    async def _wait_for(self, names: Sequence[str]) -> dict[str, str]:
        """Load adapters for the first call of the queue."""
        keys: dict[str, str] = {}
        try:
            while missing := [name for name in names if name not in keys]:
                with self._lock:
                    adapter = self._known(missing[0])
                    if adapter.in_memory:
                        keys[adapter.name] = self._use(adapter)
                        continue
                freed = self._expect_release()
                if not self._make_room(adapter, names):
                    await freed.wait()
                    continue
                try:
                    await call_in_thread(self._add, adapter, self._execute, is_new=False)
                except ModelFailed as error:
                    raise InvalidInput(error.message) from error
                except Overloaded:  # another was loaded there meanwhile
                    continue
        except BaseException:
            self.release(keys.values())
            raise
        finally:
            self._waiting = None
            with self._lock:
                for each in self._in_memory.values():
                    each.is_leaving = False
        return keys

    def _expect_release(self) -> asyncio.Event:
        """Return the event that is set when an adapter may have become free, in any thread."""
        freed, loop = asyncio.Event(), asyncio.get_running_loop()
        self._waiting = lambda: loop.call_soon_threadsafe(freed.set)
        return freed

    def _wake(self) -> None:
        if (waiting := self._waiting) is not None:
            waiting()

    def _make_room(self, adapter: _Adapter, names: Collection[str]) -> bool:
        """Return whether there is room for an adapter, once those that leave for it are not in use; mark these.

        Raises Overloaded if there will be none.
        """
        with self._lock:
            leaving = self._find_room(adapter, lambda each: each.name not in names)
            for each in leaving:
                each.is_leaving = True
            return not any(each.uses for each in leaving)

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
            for other in self._evict(adapter):
                execute(partial(_remove, other.key))
            self._generation += 1
            adapter.key = f"{adapter.name}:{self._generation}"
            execute(lambda engine: engine.add_adapter(adapter.key, weights, adapter.name))
            with self._lock:
                adapter.in_memory = True
                self._in_memory[adapter.key] = adapter
                if is_new:
                    self._adapters[adapter.name] = adapter
                    self.names[:] = sorted(self._adapters)
        self._drop_unused()

    def _evict(self, adapter: _Adapter) -> list[_Adapter]:
        """Take adapters that are not in use out of memory. Raises Overloaded if that does not make room."""
        with self._lock:
            evicted = self._find_room(adapter, lambda each: not each.uses)
            for each in evicted:
                each.in_memory = each.is_leaving = False
                del self._in_memory[each.key]
        return evicted

    def _find_room(self, adapter: _Adapter, may_leave: Callable[[_Adapter], bool]) -> list[_Adapter]:
        """Return adapters whose places are enough: the one that is replaced, unused ones, then the least recently used.

        Raises Overloaded if there are not enough that may leave: pinned ones do not.
        """
        limits, others = self._limits, list(self._in_memory.values())
        count, size = len(others) + 1, adapter.size + sum(each.size for each in others)
        chosen: list[_Adapter] = []
        for each in sorted(others, key=lambda each: (each.name != adapter.name, each.uses > 0, each.used_s)):
            if count <= limits.max_adapters and size <= limits.adapter_memory << 20:
                break
            if may_leave(each) and (not each.is_pinned or each.name == adapter.name):
                chosen.append(each)
                count, size = count - 1, size - each.size
        if count > limits.max_adapters or size > limits.adapter_memory << 20:
            raise Overloaded(
                f"no room for the adapter '{adapter.name}': all {len(others)} in memory are pinned or in use"
            )
        return chosen

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
