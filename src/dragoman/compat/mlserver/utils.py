"""Path of the model file, and identifiers."""

import uuid
from collections.abc import Sequence
from pathlib import Path

from dragoman.compat.mlserver.errors import InvalidModelURI
from dragoman.compat.mlserver.settings import ModelSettings


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
