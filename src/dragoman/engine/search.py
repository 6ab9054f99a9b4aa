"""Find the models at a path: a file, a folder of versions, a folder of models, or `module:object`.

The name of a model depends on its own file or folder alone, never on what lies beside it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.engine import model_files
from dragoman.engine.umbridge_names import umbridge_names
from dragoman.runtimes.recognise import own_name, recognise, why_not, why_skipped

# `package.module:object` or `any folder/file.py:object`.
_OBJECT = re.compile(r"(?:[A-Za-z_][\w.]*|.+\.py):[A-Za-z_][\w.]*")
_IGNORED = {"__pycache__", "node_modules"}
# So many files that are not served are named where there is nothing else to serve.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Found:
    """A model on disk: where it lies and what the files beside it say of it."""

    name: str
    path: Path | None
    settings: Mapping[str, Any]
    versions: Mapping[str, Path]
    error: InvalidInput | None = None  # what its files say makes no sense


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file in a folder of models that looks like a model and is not served: its place, and why."""

    file: str
    reason: str


@dataclass(slots=True)
class Search:
    """A search for models. `skipped` collects the files that are not served.

    Without `run_code` a Python file is never imported, and its models have the file's name instead of their own.
    """

    run_code: bool = True
    skipped: list[Skipped] = field(default_factory=list)
    _root: Path = field(default_factory=Path)

    def models(self, path: str) -> list[Found]:
        """The models at a path. Raises InvalidInput where there are none, or where it cannot be read."""
        before = len(self.skipped)
        try:
            there = list(self._look(path))
        except OSError as error:
            raise InvalidInput(f"'{path}' cannot be read: {error.strerror or error}") from error
        if not there:
            reasons = [f"{each.file}: {each.reason}" for each in self.skipped[before:][:_NAMED]]
            told = "; ".join(reasons) or "expected a model file, a folder of models or module:object"
            raise InvalidInput(f"found no model in '{path}'; {told}")
        return there

    def _look(self, path: str) -> Iterator[Found]:
        place = Path(path)
        if _OBJECT.fullmatch(path) and not place.exists():
            yield Found(self._object_name(path), None, {"runtime": "python", "uri": path}, {})
        elif place.is_dir():
            self._root = place.resolve()
            settings = model_files.environment_settings(self._root)
            if settings is None:
                yield from self._look_in(self._root)
            else:
                yield Found(settings.get("name") or _name(self._root), self._root, settings, {})
        elif place.is_file():
            if recognise(place) is None:
                told = f"no runtime is known for the file '{path}'; expected a model file that docs/serving.md lists, "
                raise InvalidInput(
                    why_not(place) or told + "or a folder with it and a dragoman.toml that names its runtime"
                )
            yield from self._file(place.resolve(), _name(place))
        else:
            raise InvalidInput(f"'{path}' is not there; expected a model file, a folder of models or module:object")

    def _object_name(self, path: str) -> str:
        place, _, attribute = path.rpartition(":")
        own = umbridge_names(Path(place), attribute) if self.run_code and place.endswith(".py") else {}
        return next(iter(own), attribute.rpartition(".")[2])

    def _file(
        self, file: Path, name: str, settings: Mapping[str, Any] | None = None, folder: Path | None = None
    ) -> Iterator[Found]:
        """The models in a file: of Python, by the names that they give themselves. `folder`: the one that it makes a
        model."""
        own = umbridge_names(file) if self.run_code and file.suffix == ".py" else {}
        if len(own) < 2:
            yield Found(next(iter(own), name), folder or file, settings or {}, {})
            return
        for each, attribute in own.items():
            yield Found(each, None, {"runtime": "python", **(settings or {}), "uri": f"{file}:{attribute}"}, {})

    # --- folders -----------------------------------------------------------------------------------------------

    def _look_in(self, folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Found]:
        above = above or frozenset({folder.resolve()})
        settings = model_files.model_settings(folder)
        folders = [p for p in _visible(folder) if p.is_dir()]
        versions = {p.name: p for p in folders if p.name.isdecimal() and not _described(p)}
        if settings is not None or versions or recognise(folder) is not None:
            yield from self._model_folder(folder, settings or {}, versions)
            if _described(folder):  # MLServer: every model-settings.json is a model, wherever it lies
                yield from (found for p in folders for found in self._described_below(p))
            return
        overrides = model_files.repository_settings(folder)
        below = [found for p in folders for found in self._look_below(p, above)]
        for found in [*self._files_in(folder), *below]:
            yield replace(found, settings={**found.settings, **overrides.pop(found.name, {})})
        if overrides:
            raise InvalidInput(f"{folder / 'dragoman.toml'}: there is no model {', '.join(map(repr, overrides))} here")

    def _model_folder(self, folder: Path, settings: Mapping[str, Any], versions: Mapping[str, Path]) -> Iterator[Found]:
        """The model that a folder is."""
        if "uri" in settings:
            versions = {}
        named = settings.get("name") or ""
        if not named and not versions and "uri" not in settings and _is_python(folder, settings):
            yield from self._file(folder / "model.py", folder.name, settings, folder)
        else:
            yield Found(named or _name(folder), folder, settings, versions)

    def _files_in(self, folder: Path) -> list[Found]:
        """The models that files directly in a folder are: each in the folder that is served, one in a sub-folder."""
        there = [p for p in _visible(folder) if p.is_file()]
        files = [p for p in there if p.suffix != ".py" and recognise(p) is not None]
        for path in there:
            if path not in files and (reason := why_skipped(path)):
                self._skip(path, reason)
        if folder == self._root:
            return [Found(folder.name if p.stem == "model" else _name(p), p, {}, {}) for p in files]
        if not files:
            return []
        chosen = [p for p in files if p.stem == "model"] or files
        if len(chosen) > 1:
            several = ", ".join(p.name for p in chosen)
            error = InvalidInput(
                f"sub-folder '{folder.name}' holds several models: {several}; expected one, or one called model.*: "
                "move each to a sub-folder of its own, name one as `uri` in a dragoman.toml there, or serve the "
                "sub-folder itself"
            )
            return [Found(folder.name, folder, {}, {}, error)]
        for path in files:
            if path != chosen[0]:
                self._skip(path, f"the sub-folder is one model, '{chosen[0].name}'; move it to a sub-folder of its own")
        return [Found(folder.name, chosen[0], {}, {})]

    def _skip(self, path: Path, reason: str) -> None:
        self.skipped.append(Skipped(str(Path(self._root.name) / path.relative_to(self._root)), reason))

    def _look_below(self, folder: Path, above: frozenset[Path]) -> Iterator[Found]:
        """As `_look_in`, for one of several folders: its error is its own, and a link back up leads nowhere."""
        real = folder.resolve()
        if real in above:
            return
        try:
            yield from self._look_in(folder, above | {real})
        except (InvalidInput, OSError) as error:
            told = error if isinstance(error, InvalidInput) else InvalidInput(f"{folder} cannot be read: {error}")
            yield Found(folder.name, folder, {}, {}, told)

    def _described_below(self, folder: Path) -> Iterator[Found]:
        if _described(folder):
            yield from self._look_in(folder)
        else:
            yield from (found for p in _visible(folder) if p.is_dir() for found in self._described_below(p))


def _is_python(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the folder's model is its `model.py`, for the runtime of Python files."""
    return settings.get("runtime", "python") == "python" and recognise(folder) == "python"


def _described(folder: Path) -> bool:
    return (folder / "model-settings.json").is_file()


def _visible(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p.name not in _IGNORED)


def _name(path: Path) -> str:
    """Return the name of a model that no file beside it names."""
    return own_name(path) or (path.name if path.is_dir() else path.stem)
