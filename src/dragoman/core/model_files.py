"""Declaration of the files and environment variables by which folders of another server describe their models."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from dragoman.core.dialect import Dialect


def _no_table(_folder: Path) -> None:
    return None


def _no_server_table(folder: Path) -> tuple[str, dict[str, Any]]:
    return str(folder), {}


def _no_paths(_environment: Mapping[str, str]) -> list[str]:
    return []


class ModelFiles(Struct, frozen=True, kw_only=True):
    """The settings of another server's folders, as an entry point of the group `dragoman.model_files` names it.

    Tables have the keys of `dragoman.toml`. The functions raise InvalidInput that names the file and the field.

    Parameters
    ----------
    file : the settings file in the folder of a model.
    model_table : returns the table `[model]` for the files in a folder, None if it has none.
    environment_table : returns the table `[model]` of the one model of a folder that environment variables describe,
        None if they describe none.
    server_table : returns the table `[server]` for the folder that is served, and where it comes from.
    environment_paths : returns the paths to serve that environment variables name.
    is_nested : folders below that of a model may hold further models with a settings file.
    dialect : habits of that server that its models keep, None to leave them as they are.
    """

    file: str
    model_table: Callable[[Path], dict[str, Any] | None]
    environment_table: Callable[[Path], dict[str, Any] | None] = _no_table
    server_table: Callable[[Path], tuple[str, dict[str, Any]]] = _no_server_table
    environment_paths: Callable[[Mapping[str, str]], list[str]] = _no_paths
    is_nested: bool = False
    dialect: Dialect | None = None
