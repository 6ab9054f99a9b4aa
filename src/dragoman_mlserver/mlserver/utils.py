"""Path of the model file, identifiers, and headers of requests and responses."""

import asyncio
import inspect
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from dragoman_mlserver.mlserver.errors import InvalidModelURI
from dragoman_mlserver.mlserver.settings import ModelSettings
from dragoman_mlserver.mlserver.types import InferenceRequest, InferenceResponse, Parameters


async def get_model_uri(settings: ModelSettings, wellknown_filenames: Sequence[str] = ()) -> str:
    """Return the path of the model file: `uri`, or the first of the well-known file names in that folder.

    Raises InvalidModelURI if it is not found.
    """
    uri = settings.parameters.uri if settings.parameters is not None else None
    if not uri:
        raise InvalidModelURI(settings.name)
    return _find(Path(to_absolute_path(settings, uri)), settings.name, wellknown_filenames)


def _find(path: Path, model: str, wellknown_filenames: Sequence[str]) -> str:
    if path.is_file():
        return str(path)
    if path.is_dir():
        return next((str(path / name) for name in wellknown_filenames if (path / name).is_file()), str(path))
    raise InvalidModelURI(model, str(path))


def to_absolute_path(model_settings: ModelSettings, uri: str) -> str:
    """Return a uri relative to the folder of the settings as an absolute path."""
    source = model_settings._source
    return uri if source is None else str(Path(source).parent / uri)


def generate_uuid() -> str:
    return str(uuid.uuid4())


def insert_headers(inference_request: InferenceRequest, headers: Mapping[str, str]) -> InferenceRequest:
    """Set the headers of a request."""
    if inference_request.parameters is None:
        inference_request.parameters = Parameters()
    inference_request.parameters.headers = dict(headers)
    return inference_request


def extract_headers(inference_response: InferenceResponse) -> dict[str, str] | None:
    """Remove the headers of a response, and return them; None if it has none."""
    parameters = inference_response.parameters
    if parameters is None:
        return None
    headers, parameters.headers = parameters.headers, None
    return headers


def get_wrapped_method(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method below its decorators."""
    method: Callable[..., Any] = inspect.unwrap(f)
    return method


def schedule_with_callback(coro: Coroutine[Any, Any, Any], cb: Callable[[Any], Any]) -> "asyncio.Task[Any]":
    """Run a coroutine as a task, and call `cb` with the task at its end."""
    task = asyncio.create_task(coro)
    task.add_done_callback(cb)
    return task
