"""Version weights that clients have set, in the state store or a file, so that they outlive the server."""

import asyncio
import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dragoman.core.documents import read_json
from dragoman.core.errors import Forbidden, InvalidInput, ServerError
from dragoman.core.state_store import StateStore, StateTable
from dragoman.engine.version_routing import VersionRouting, parse_weights
from dragoman.system.files import replace_file

log = logging.getLogger("dragoman.engine")

# The path that stands for no file.
MEMORY = "-"


class SavedWeights:
    """Weights of versions by model, as load requests have set them.

    store: with a file, it keeps them. path: the file of earlier releases, whose weights a new store takes over;
    without a store it keeps them. "-": they are kept in memory only; "": there are none. That file is JSON:
    `{"iris": {"1": 95, "2": 5}}`. It is replaced as a whole. Raises InvalidInput if it is not that.
    """

    def __init__(self, path: str = "", store: StateStore | None = None) -> None:
        self._table = store.table("version_weights") if store is not None and store.is_configured else None
        self._path = Path(path) if path and path != MEMORY else None
        self._allows_weights = bool(path) or self._table is not None
        self._by_model: dict[str, Mapping[str, float]] = {}
        self._lock = asyncio.Lock()
        if self._path is not None:
            log.warning("setting 'version_weights_file' ends with the next release: name a file for `state` instead")
            self._by_model = _read(self._path)
        if self._table is not None:
            self._path = None
            if self._table.stored_version:
                self._by_model = {model: weights for (_, model), weights in self._table.read(dict[str, float]).items()}
            for model, weights in self._by_model.items():
                self._table.put(model, weights)

    def check_allowed(self) -> None:
        """Raise Forbidden if weights of load requests would end with the server, against the operator's will."""
        if not self._allows_weights:
            raise Forbidden(
                "parameter 'version_weights' is not allowed: expected the setting state, a file that keeps the weights "
                "over a restart, or version_weights_file '-'; else the newest version would get all requests then"
            )

    def versions(self, model: str) -> Collection[str]:
        """Return the versions of a model that have saved weights."""
        return self._by_model.get(model, {})

    def restore(self, model: str, routing: VersionRouting, served: Collection[str]) -> VersionRouting:
        """Return the routing with the saved weights of a model, if there are some and their versions are served."""
        weights = self._by_model.get(model)
        if weights is None:
            return routing
        missing = sorted({*weights} - {*served})
        if missing:
            log.error(
                "model '%s': the version weights that a load request has set are not used: expected the versions %s, "
                "got none of this name: %s",
                model, ", ".join(weights), ", ".join(missing),
            )  # fmt: skip
            return routing
        return replace(routing, weights=weights, is_override=True)

    async def save(self, model: str, routing: VersionRouting) -> None:
        """Save the weights of a model if a load request has set them, else forget those before.

        Raises ServerError if they cannot be written.
        """
        weights = routing.weights if routing.is_override else None
        if weights == self._by_model.get(model):
            return
        async with self._lock:
            by_model = {name: each for name, each in self._by_model.items() if name != model}
            if weights is not None:
                by_model[model] = weights
            if self._table is not None:
                self._by_model = by_model  # it is written once that is possible again
                await self._put(self._table, model, weights)
            elif self._path is not None:
                await self._write(self._path, json.dumps(by_model, indent=1, sort_keys=True), model)
            self._by_model = by_model

    async def _put(self, table: StateTable, model: str, weights: Mapping[str, float] | None) -> None:
        if weights is None:
            table.delete(model)
        else:
            table.put(model, weights)
        if not await table.flush():
            raise _not_saved(model)

    async def _write(self, path: Path, text: str, model: str) -> None:
        try:
            await asyncio.to_thread(replace_file, path, text)
        except OSError as error:
            log.error("the version weights cannot be saved: %s", error)
            raise _not_saved(model) from error


def _not_saved(model: str) -> ServerError:
    return ServerError(
        f"the version weights of model '{model}' are in use, but could not be saved: they end with the server"
    )


def _read(path: Path) -> dict[str, Mapping[str, float]]:
    """Return the weights in a file, none if there is no file yet. Raises InvalidInput."""
    setting = f"setting 'version_weights_file': {path}"
    try:
        found: Any = read_json(path)
    except FileNotFoundError:
        if not path.absolute().parent.is_dir():
            raise InvalidInput(f"{setting}: expected a file in a folder that exists") from None
        return {}
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{setting}: expected a JSON file of weights by model and version: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{setting}: expected an object of weights by model and version")
    return {name: parse_weights(weights, f"{setting}: model '{name}'") for name, weights in found.items()}
