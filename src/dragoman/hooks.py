"""Entry points by which features and other packages extend the server.

Our features and packages of others use the same groups, `dragoman.<group>`: see docs/contributing.md. A feature is an
import package of this distribution, such as `dragoman_check`; the server runs without it.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError, distribution, distributions
from typing import Any

from dragoman.core.errors import ModelFailed

log = logging.getLogger("dragoman.plugins")


@cache
def own_entries(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of this distribution by name, without those of features that are not installed.

    Those of other packages are not read, which takes milliseconds. Raises ModelFailed if Dragoman itself is not
    installed.
    """
    return {entry.name: entry for entry in _declared(group) if _is_installed(entry.module.partition(".")[0])}


def missing_names(group: str) -> set[str]:
    """Return the names of the entry points of features that are not installed."""
    return _declared(group).names - own_entries(group).keys()


def _declared(group: str) -> EntryPoints:
    return _own_declarations().select(group=f"dragoman.{group}")


@cache
def _own_declarations() -> EntryPoints:
    try:
        return distribution("dragoman").entry_points
    except PackageNotFoundError:
        raise ModelFailed("the package 'dragoman' is not installed; run pip install -e . in its folder") from None


@cache
def _is_installed(package: str) -> bool:
    """Return whether a package of this distribution is there. One that is missing is logged once."""
    try:
        found = importlib.util.find_spec(package) is not None
    except ImportError:
        found = False
    if not found:
        log.warning("the feature '%s' is not installed: what it adds is not available", package)
    return found


def other_entries(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of other packages by name."""
    own = _declared(group).names
    return {entry.name: entry for entry in _foreign(group) if entry.name not in own}


def _foreign(group: str) -> list[EntryPoint]:
    """Return the entry points of other packages."""
    own = {*_declared(group)}
    return [
        each for each in _declared_on_path(tuple(sys.path)) if each.group == f"dragoman.{group}" and each not in own
    ]


@lru_cache(1)
def _declared_on_path(_path: tuple[str, ...]) -> list[EntryPoint]:
    """Return the entry points of all our groups that packages on `sys.path` have; one look for all hooks.

    `importlib.metadata.entry_points` parses those of every installed package: 12 instead of 3.5 ms for 290 packages.
    """
    packages = {each.name for each in distributions() if "[dragoman." in (each.read_text("entry_points.txt") or "")}
    # Of several versions on the path, the first one counts.
    found = [entry for name in sorted(packages) for entry in distribution(name).entry_points]
    return [entry for entry in found if entry.group.startswith("dragoman.")]


def entry(group: str, name: str) -> EntryPoint | None:
    """Return the entry point of that name, None if there is none. Ours go before those of other packages."""
    found = own_entries(group).get(name)
    return found or next((each for each in _foreign(group) if each.name == name), None)


@cache
def all_of(group: str) -> Mapping[str, Any]:
    """Return the objects of a group by name, ours first. One that cannot be imported is left out, with a warning."""
    found = {}
    for name, each in {**other_entries(group), **own_entries(group)}.items():
        try:
            found[name] = getattr(importlib.import_module(each.module), each.attr)
        except Exception as error:
            log.warning("%s not available: name=%s error=%s: %s", group, name, type(error).__name__, error)
    return found
