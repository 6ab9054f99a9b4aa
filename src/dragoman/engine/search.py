"""Find the models at a path: a file, a folder of versions, a folder of models, or `module:object`.

The name of a model depends only on its own file or folder, never on other files.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman import plugins
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.model_digests import is_listed
from dragoman.engine import model_files
from dragoman.runtimes.recognise import own_name, recognise, refusal, skip_reason
from dragoman.runtimes.unserved import UNKNOWN, reason_of
from dragoman.workers.probe import probe

log = logging.getLogger("dragoman.engine")

# `package.module:object` or `any folder/file.py:object`.
_OBJECT = re.compile(r"(?:[A-Za-z_][\w.]*|.+\.py):[A-Za-z_][\w.]*")
_IGNORED = {"__pycache__", "node_modules"}
# Number of skipped files that the error names if there is nothing to serve.
_SKIPPED_NAMED = 3
# Seconds that a file may take to be imported: as long as a model may take to load.
_IMPORT_TIMEOUT_S = 600.0
_NO_MODEL = "the folder holds no model file"
# A file with none of these contains no model of the `umbridge` package, and at most one function of vectors.
_VECTOR_MARKS = re.compile(
    rb"umbridge|get_input_sizes|(?s:\bvector_function\b.*\n.*\bvector_function\b)"
    rb"|\bvector_function\s+as\b|=[^\n]*\bvector_function\b"  # another name for it, which may occur often
)


class FoundModel(msgspec.Struct, frozen=True):
    """A model on disk, with the settings in its files. versions: their paths, by number."""

    name: str
    path: Path | None
    settings: Mapping[str, Any]
    versions: Mapping[str, Path]
    error: InvalidInput | None = None  # in its files


class SkippedFile(msgspec.Struct, frozen=True):
    """A file in a folder of models that looks like a model and is not served."""

    file: str
    reason: str

    def is_of(self, model: str) -> bool:
        """Return whether a model of this name would be made of the file: the file or its folder has that name."""
        path = Path(self.file)
        return model in (path.parent.name, path.stem)


class Search(msgspec.Struct):
    """A search for models. `skipped` collects the files that are not served.

    Without `run_code` a Python file is never imported, and its models have the file's name instead of their own. With
    `may_be_empty` a folder may hold no model yet, or be missing. With `model_digests` only files in that
    list are imported.
    """

    run_code: bool = True
    may_be_empty: bool = False
    model_digests: str = ""
    skipped: list[SkippedFile] = msgspec.field(default_factory=list)
    _root: Path = msgspec.field(default_factory=Path)

    def models(self, path: str) -> list[FoundModel]:
        """Return the models at a path. Raises InvalidInput if there are none, or if it cannot be read."""
        before = len(self.skipped)
        if self.may_be_empty and not Path(path).exists() and not _OBJECT.fullmatch(path):
            return []
        try:
            models = list(self._search(path))
        except OSError as error:
            raise InvalidInput(f"'{path}' cannot be read: {error.strerror or error}") from error
        if not models and not (self.may_be_empty and Path(path).is_dir()):
            reasons = [f"{file.file}: {file.reason}" for file in self.skipped[before:][:_SKIPPED_NAMED]]
            hint = "; ".join(reasons) or "expected a model file, a folder of models or module:object"
            raise InvalidInput(f"found no model in '{path}'; {hint}")
        return models

    def _search(self, name: str) -> Iterator[FoundModel]:
        path = Path(name)
        if _OBJECT.fullmatch(name) and not path.exists():
            runtime = recognise(Path(name.rpartition(":")[0])) or "python"
            yield FoundModel(self._object_name(name), None, {"runtime": runtime, "uri": name}, {})
        elif path.is_dir():
            self._root = path.resolve()
            if recognise(path) is None and (reason := reason_of(self._root)):
                raise InvalidInput(f"'{name}' is not served: {reason}")
            settings = model_files.environment_settings(self._root)
            if settings is None:
                yield from self._search_folder(self._root)
            else:
                yield FoundModel(settings.get("name") or _name(self._root), self._root, settings, {})
        elif path.is_file():
            if recognise(path) is None:
                raise InvalidInput(f"'{name}' is not served: {refusal(path)}")
            yield from self._file(path.resolve(), _name(path))
        else:
            raise InvalidInput(f"'{name}' not found: expected a model file, a folder of models or module:object")

    def _may_run(self, file: Path) -> bool:
        return self.run_code and (not self.model_digests or is_listed(file.resolve(), self.model_digests))

    def _object_name(self, uri: str) -> str:
        file, _, attribute = uri.rpartition(":")
        own = _vector_names(Path(file), attribute) if file.endswith(".py") and self._may_run(Path(file)) else {}
        return next(iter(own), attribute.rpartition(".")[2])

    def _file(
        self, file: Path, name: str, settings: Mapping[str, Any] | None = None, folder: Path | None = None
    ) -> Iterator[FoundModel]:
        """Yield the models in a file: several functions of vectors, and those of `umbridge` and KServe by their names.

        folder: the folder of a model whose file this is.
        """
        runtime = recognise(file) if file.suffix == ".py" else None
        own = _own_names(file, runtime or "", run_code=runtime == "python" and self._may_run(file))
        if len(own) < 2:
            yield FoundModel(next(iter(own), name), folder or file, settings or {}, {})
            return
        for name, attribute in own.items():
            yield FoundModel(name, None, {"runtime": runtime, **(settings or {}), "uri": f"{file}:{attribute}"}, {})

    # --- folders -----------------------------------------------------------------------------------------------

    def _search_folder(self, folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[FoundModel]:
        above = above or frozenset({folder.resolve()})
        settings = model_files.model_settings(folder)
        folders = [p for p in _entries(folder) if p.is_dir()]
        versions = {p.name: p for p in folders if p.name.isdecimal() and not model_files.has_models_below(p)}
        if settings is not None or versions or recognise(folder) is not None:
            yield from self._model_folder(folder, settings or {}, versions)
            if model_files.has_models_below(folder):
                yield from (source for p in folders for source in self._search_settings(p))
            return
        if reason := reason_of(folder):
            self._skip(folder, reason)
            return
        overrides = model_files.repository_settings(folder)
        below = [source for p in folders for source in self._search_subfolder(p, above)]
        for source in [*self._model_files(folder), *below]:
            yield replace(source, settings={**source.settings, **overrides.pop(source.name, {})})
        if overrides:
            raise InvalidInput(
                f"{folder / 'dragoman.toml'}: unknown model {', '.join(map(repr, overrides))} in this folder"
            )

    def _model_folder(
        self, folder: Path, settings: Mapping[str, Any], versions: Mapping[str, Path]
    ) -> Iterator[FoundModel]:
        """Yield the one model of a folder, or those of its `model.py`."""
        if "uri" in settings:
            versions = {}
        name = settings.get("name") or ""
        if not name and not versions and "uri" not in settings and _is_python(folder, settings):
            yield from self._file(folder / "model.py", folder.name, settings, folder)
        else:
            yield FoundModel(name or _name(folder), folder, settings, versions)

    def _model_files(self, folder: Path) -> list[FoundModel]:
        """Return models that are files: each one directly in the folder that is served, at most one in a sub-folder."""
        paths = [p for p in _entries(folder) if p.is_file()]
        files = [p for p in paths if p.suffix != ".py" and recognise(p) is not None]
        belong = UNKNOWN if files and folder != self._root else ""  # files of unknown kinds beside the model
        for path in paths:
            if path not in files and (reason := skip_reason(path)) and reason != belong:
                self._skip(path, reason)
        if folder == self._root:
            return [FoundModel(folder.name if p.stem == "model" else _name(p), p, {}, {}) for p in files]
        if not files:
            return []
        chosen = [p for p in files if p.stem == "model"] or files
        if len(chosen) > 1:
            names = ", ".join(p.name for p in chosen)
            error = InvalidInput(
                f"sub-folder '{folder.name}' holds several models: {names}; expected one, or one called model.*: "
                "move each to a sub-folder of its own, name one as `uri` in a dragoman.toml there, or serve the "
                "sub-folder itself"
            )
            return [FoundModel(folder.name, folder, {}, {}, error)]
        for path in files:
            if path != chosen[0]:
                self._skip(path, f"the sub-folder is one model, '{chosen[0].name}'; move it to a sub-folder of its own")
        return [FoundModel(folder.name, chosen[0], {}, {})]

    def _skip(self, path: Path, reason: str) -> None:
        self.skipped.append(SkippedFile(str(Path(self._root.name) / path.relative_to(self._root)), reason))

    def _search_subfolder(self, folder: Path, above: frozenset[Path]) -> Iterator[FoundModel]:
        """As `_search_folder`, but yield an error as one of this folder, and nothing for a link to a folder above."""
        real = folder.resolve()
        if real in above:
            return
        before, is_empty = len(self.skipped), True
        try:
            for found in self._search_folder(folder, above | {real}):
                is_empty = False
                yield found
        except (InvalidInput, OSError) as error:
            reason = error if isinstance(error, InvalidInput) else InvalidInput(f"{folder} cannot be read: {error}")
            yield FoundModel(folder.name, folder, {}, {}, reason)
            return
        if is_empty and all(
            file.reason.endswith(UNKNOWN) or file.reason == _NO_MODEL for file in self.skipped[before:]
        ):
            self._skip_folder(folder, before)

    def _skip_folder(self, folder: Path, before: int) -> None:
        """Report a folder without models instead of its files of unknown kinds and its sub-folders."""
        unknown = [file for file in self.skipped[before:] if file.reason != _NO_MODEL]
        del self.skipped[before:]
        if unknown:
            name = Path(unknown[0].file).name
            self._skip(folder, unknown[0].reason if len(unknown) == 1 else f"{_NO_MODEL}; {name}: {UNKNOWN}")
        elif any(_entries(folder)):
            self._skip(folder, _NO_MODEL)

    def _search_settings(self, folder: Path) -> Iterator[FoundModel]:
        if model_files.has_models_below(folder):
            yield from self._search_folder(folder)
        else:
            yield from (source for p in _entries(folder) if p.is_dir() for source in self._search_settings(p))


def _is_python(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether the model of a folder is its `model.py`, for the runtime of Python files."""
    return settings.get("runtime", "python") == "python" and recognise(folder) == "python"


def _entries(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p.name not in _IGNORED)


def _name(path: Path) -> str:
    return own_name(path) or (path.name if path.is_dir() else path.stem)


def _own_names(file: Path, runtime: str, *, run_code: bool) -> Mapping[str, str]:
    """Return the attributes of the models in a Python file by the names that they give themselves."""
    if runtime == "kserve":  # read from the source
        model_names = plugins.runtime(runtime).model_names
        assert model_names is not None
        return model_names(str(file), "")
    return _vector_names(file) if runtime == "python" and run_code else {}


def _vector_names(file: Path, attribute: str = "") -> dict[str, str]:
    """Return the attributes of functions of vectors and models of `umbridge` in a Python file, by their own names.

    The file is imported in another process, and again only after it has changed. With an `attribute` only that model is
    returned. Empty for any other file, and for one that cannot be imported: loading it reports the error.
    """
    try:
        text, stat = file.read_bytes(), file.stat()
    except OSError:
        return {}
    if not _VECTOR_MARKS.search(text):
        return {}
    key = str(file.resolve()), stat.st_mtime_ns, stat.st_size
    try:
        names = _inspect(*key, attribute if "." in attribute else "")
        if attribute in names["classes"]:
            names = _inspect(*key, attribute)
    except ModelFailed as error:
        log.debug("names of models unknown: file=%s error=%s", file, error.message)
        return {}
    if attribute in names["instances"]:
        return {names["instances"][attribute]: attribute}
    served: dict[str, str] = names["served"]
    return served if not attribute else {name: a for name, a in served.items() if a == attribute}


@lru_cache(256)
def _inspect(file: str, _changed_ns: int, _size: int, attribute: str) -> dict[str, Any]:
    log.info("importing a file for the names of its models: file=%s", file)
    model_names = plugins.runtime("python").model_names
    assert model_names is not None
    names: dict[str, Any] = probe(model_names, [file, attribute], _IMPORT_TIMEOUT_S)
    return names
