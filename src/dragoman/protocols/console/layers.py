"""The layers of a model for the console: what its file says of its graph, without the values of weights."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from dragoman import plugins
from dragoman.core.calls import Describe, ModelDescription, Request
from dragoman.protocols.wire import EngineCall, HttpError, HttpRequest, HttpResponse, Route, json_response

# Of plug-ins by platform: returns the graph of a file as JSON values. Raises ValueError and OSError.
_Read = Callable[[Path], dict[str, Any]]


def has_layers(model: ModelDescription) -> bool:
    """Return whether the layers of a model can be read."""
    return bool(model.path) and plugins.has("layers", model.platform)


def routes() -> list[Route]:
    patterns = ("/console/models/{model}/layers", "/console/models/{model}/versions/{version}/layers")
    return [Route("GET", pattern, _layers, role="read") for pattern in patterns]


def _layers(http: HttpRequest) -> EngineCall[ModelDescription, HttpResponse]:
    request = Request(Describe(), http.params["model"], http.params.get("version", ""))
    return EngineCall(request, lambda r: _respond(r.answer), in_thread=True)


def _respond(model: ModelDescription) -> HttpResponse:
    if not has_layers(model):
        raise HttpError(404, "the layers of this model are not known")
    try:
        path = _file(Path(model.path))
        changed = path.stat()
        return _read(model.platform, path, changed.st_mtime_ns, changed.st_size)
    except (OSError, ValueError) as error:  # without its text, which has the path of the file
        raise HttpError(404, "the layers of this model cannot be read from its file") from error


def _file(path: Path) -> Path:
    """Return the file of a model; of a folder the first that may have layers."""
    return path if not path.is_dir() else min(path.glob("*.onnx"))


@lru_cache(maxsize=2)
def _read(platform: str, path: Path, _changed_ns: int, _size: int) -> HttpResponse:
    """Return the response for a file; that of the last ones is kept, so that looking again costs nothing."""
    read: _Read = plugins.find("layers", platform)
    return json_response(read(path))
