"""The repository: the models that a server may load, from paths on disk and from Python objects."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import structs

from dragoman.core.errors import DragomanError, Forbidden, InvalidInput, NotSupported
from dragoman.core.file_states import file_states
from dragoman.core.spec import ModelSpec, check_name
from dragoman.engine.search import FoundModel, Search, SkippedFile
from dragoman.engine.version_routing import VersionRouting
from dragoman.runtimes.recognise import model_file, recognise, refusal

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_EXPECTED_URL = "`url`: expected the absolute path, or the file:// URL, of a folder or file on the server's machine"
_ROUTING = ("default_version", "version_weights")
_POLICY = re.compile(r"latest|all|\d+(?:\s*,\s*\d+)*")


class Source(msgspec.Struct, frozen=True):
    """The source of a model. specs: returns the versions that are to be served, as they are on disk now.

    routing: which version answers requests that name none.
    all_specs: returns every version on disk, also those that are not to be served; empty if these are all.
    """

    specs: Callable[[], list[ModelSpec]]
    routing: VersionRouting = msgspec.field(default_factory=VersionRouting)
    all_specs: Callable[[], list[ModelSpec]] = list

    def state(self) -> "ModelOnDisk":
        """Return the versions on disk, or the error that prevents loading them."""
        try:
            return ModelOnDisk(tuple(self.specs()), self.routing)
        except (DragomanError, OSError) as error:
            return ModelOnDisk((), self.routing, str(error))


class ModelOnDisk(msgspec.Struct, frozen=True):
    """A model as it is on disk: the versions that are to be served, with their files, or an error."""

    specs: tuple[ModelSpec, ...]
    routing: VersionRouting = msgspec.field(default_factory=VersionRouting)
    error: str = ""


class Repository:
    """A fixed list of models. skipped: files that look like models and that the last scan did not serve."""

    skipped: Sequence[SkippedFile] = ()

    def __init__(self, specs: Sequence[ModelSpec] = ()) -> None:
        self._fixed = tuple(specs)
        names: set[tuple[str, str]] = set()
        for spec in specs:
            if (spec.name, spec.version) in names:
                raise InvalidInput(f"two models are called '{spec.name}'; give one of them another name")
            names.add((spec.name, spec.version))

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths on disk that a scan reads."""
        return ()

    def scan(self) -> dict[str, Source]:
        """Return every model that may be loaded, by name. Raises InvalidInput if models on disk are invalid."""
        names = dict.fromkeys(s.name for s in self._fixed)
        return {n: Source(lambda n=n: [s for s in self._fixed if s.name == n]) for n in names}  # type: ignore[misc]

    def at(self, name: str, url: str) -> Source:
        """Return the model at a path outside of the repository, under a name.

        Raises Forbidden, NotSupported or InvalidInput.
        """
        raise NotSupported("models are loaded only from the server's repository: expected no `url`")

    def at_folder(self, name: str, folder: Path) -> Source:
        """Return the model in a folder with the files that a client has sent. Raises NotSupported or InvalidInput."""
        raise NotSupported("models are loaded only from the server's repository: expected no files")


class DiskRepository(Repository):
    """Models below paths on disk, in addition to fixed ones. Each scan reads the disk again.

    defaults: fields of a ModelSpec for every model.
    version_policy: latest, all, or a list such as `1,3`.
    live: models that are Python objects.
    folders: models below these may be registered by URL.
    run_code, may_be_empty: see `Search`.
    model_name: the name of the only model, by default that of its file or folder.
    """

    def __init__(
        self,
        paths: Sequence[str],
        defaults: Mapping[str, Any],
        version_policy: str = "latest",
        live: Sequence[ModelSpec] = (),
        folders: Sequence[str] = (),
        *,
        run_code: bool = True,
        model_name: str = "",
        may_be_empty: bool = False,
    ) -> None:
        if model_name:
            check_name(model_name, "setting 'model_name':")
            live = [replace(spec, name=model_name) for spec in live] if len(live) == 1 else live
        super().__init__(live)
        self._model_name = model_name
        self._paths = tuple(paths)
        self._defaults = dict(defaults)
        self._version_policy = _check_policy(version_policy)
        self._folders = tuple(folders)
        self._run_code = run_code
        self._digests: str = defaults.get("model_digests", "")
        self._may_be_empty = may_be_empty

    @property
    def paths(self) -> tuple[str, ...]:
        return self._paths

    def scan(self) -> dict[str, Source]:
        sources = super().scan()
        by_name: dict[str, list[FoundModel]] = {}
        search = Search(self._run_code, self._may_be_empty, self._digests)
        for path in self._paths:
            for found in search.models(path):
                check_name(found.name, f"the model name of '{_location(found)}'")
                same = by_name.setdefault(found.name, [])
                if found.name in sources or not _are_versions([*same, found]):
                    first = _location(same[0]) if same else "a Python object"
                    raise InvalidInput(
                        f"two models are called '{found.name}': {first} and {_location(found)}; give one of them "
                        "another name, as `name` in a dragoman.toml in a folder of its own"
                    )
                same.append(found)
        self.skipped = tuple(search.skipped)
        if self._model_name:
            by_name = self._rename(by_name, sources)
        return sources | {name: self._source(same) for name, same in by_name.items()}

    def _rename(self, by_name: dict[str, list[FoundModel]], fixed: Mapping[str, Source]) -> dict[str, list[FoundModel]]:
        """Return the only model under its name in the settings. Raises InvalidInput if there are several."""
        names = [*fixed, *by_name]
        if len(names) > 1:
            raise InvalidInput(
                f"setting 'model_name': expected one model, found {len(names)}: {', '.join(names)[:256]}"
            )
        renamed = [structs.replace(found, name=self._model_name) for same in by_name.values() for found in same]
        return {self._model_name: renamed} if renamed else {}

    def at(self, name: str, url: str) -> Source:
        models = Search(self._run_code, model_digests=self._digests).models(str(_model_path(url, self._folders)))
        if len(models) != 1:
            names = ", ".join(found.name for found in models)
            raise InvalidInput(f"`url`: expected one model, found several in '{url}': {names[:256]}")
        source = self._source([structs.replace(models[0], name=name)])
        return Source(lambda: [replace(spec, url=url) for spec in source.specs()], source.routing)

    def at_folder(self, name: str, folder: Path) -> Source:
        models = Search(self._run_code, model_digests=self._digests).models(str(folder))
        if len(models) != 1:
            raise InvalidInput(f"failed to load '{name}', expected one model in its files, got {len(models)}")
        return self._source([structs.replace(models[0], name=name)])

    def _source(self, same: Sequence[FoundModel]) -> Source:
        settings: dict[str, Any] = {}
        for candidate in reversed(same):
            settings |= {key: candidate.settings[key] for key in _ROUTING if key in candidate.settings}
        routing = VersionRouting(str(settings.get("default_version", "")), settings.get("version_weights", {}))

        def specs() -> list[ModelSpec]:
            specs = [spec for found in same for spec in self._specs(found)]
            routing.check_versions(same[0].name, [spec.version for spec in specs])
            return specs

        return Source(specs, routing, lambda: [spec for found in same for spec in self._specs(found, every=True)])

    def _specs(self, found: FoundModel, *, every: bool = False) -> list[ModelSpec]:
        if found.error is not None:
            raise found.error
        fields = {k: v for k, v in found.settings.items() if k not in ("version_policy", *_ROUTING)}
        base = ModelSpec(**{**self._defaults, **fields, "name": found.name})
        if not found.versions:
            return [_with_runtime(base, found.path)]
        versions, weights = sorted(found.versions, key=int), found.settings.get("version_weights")
        if weights and "version_policy" not in found.settings and not every:  # `check_versions` reports missing ones
            versions = [version for version in versions if version in weights]
        elif not every:
            policy = _check_policy(str(found.settings.get("version_policy", self._version_policy)))
            versions = _select_versions(versions, policy, found.name)
        return [_with_runtime(replace(base, version=v, uri=""), found.versions[v]) for v in versions]


def _location(found: FoundModel) -> str:
    return str(found.path or found.settings["uri"])


def _are_versions(same: Sequence[FoundModel]) -> bool:
    """Return whether these, of one name, are one model: only one, or each with its own version in its settings."""
    versions = {found.settings.get("version", "") for found in same}
    return len(same) == 1 or (len(versions) == len(same) and not any(found.versions for found in same))


def _check_policy(policy: str) -> str:
    if not _POLICY.fullmatch(policy):
        raise InvalidInput(f"version policy '{policy}': expected latest, all, or a list of versions such as 1,3")
    return policy


def _select_versions(versions: list[str], policy: str, name: str) -> list[str]:
    if policy == "all":
        return versions
    if policy == "latest":
        return versions[-1:]
    listed = [v.strip() for v in policy.split(",")]
    missing = [v for v in listed if v not in versions]
    if missing:
        raise InvalidInput(
            f"model '{name}': version policy '{policy}': expected versions of {', '.join(versions)}, "
            f"got {', '.join(missing)}"
        )
    return [v for v in versions if v in listed]


def _with_runtime(spec: ModelSpec, path: Path | None) -> ModelSpec:
    """Return the spec with its file and runtime: those of its settings, else those recognised from the file.

    A relative file is one of the model's folder; `file.py:object` may also be relative to the working directory.
    """
    if path is None or ":" in spec.uri:
        source, _, attribute = spec.uri.rpartition(":")
        if path is not None and source.endswith(".py") and (path / source).is_file():
            spec = replace(spec, uri=f"{path / source}:{attribute}")
        spec = replace(spec, runtime=spec.runtime or "python", uri=spec.uri or str(path))
        script = Path(spec.uri.rpartition(":")[0])
        return _with_files(spec, *filter(None, [path]), *[script] * (script.suffix == ".py"))
    file = (path / spec.uri) if spec.uri else path
    if file.is_dir() and recognise(file) is None:
        file = model_file(file) or file
    runtime = spec.runtime or recognise(file)
    if runtime is None and not file.exists():
        raise InvalidInput(f"model '{spec.name}': file '{file}' not found; expected the path of the model's file")
    if runtime is None:
        raise InvalidInput(f"model '{spec.name}': '{file.name}' is not served: {refusal(file)}")
    return _with_files(replace(spec, runtime=runtime, uri=str(file)), path, file)


def _with_files(spec: ModelSpec, *paths: Path) -> ModelSpec:
    others = [*filter(None, [spec.warmup]), *spec.labels.values()]
    return replace(spec, files=file_states(*paths, *map(Path, others)))


def _model_path(url: str, folders: Sequence[str]) -> Path:
    """Return the path of a model that is registered by a path or `file://` URL, with links resolved.

    Raises NotSupported for other URLs, Forbidden outside of the allowed folders, and InvalidInput if nothing is there.
    """
    try:
        path = _local_path(url).resolve()
        if not any(Path(folder).resolve() in path.parents for folder in folders):
            allowed = f"below {' or '.join(folders)}" if folders else "in a folder of --model-folders, which is empty"
            raise Forbidden(f"`url`: '{url[:256]}' may not be loaded: expected a path {allowed}")
        path.stat()  # raises for a loop of links; since Python 3.13 `resolve` does not
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidInput(f"`url`: no file or folder at '{url[:256]}'") from error
    except (OSError, ValueError, RuntimeError) as error:  # impossible file names, loops of links
        raise InvalidInput(f"{_EXPECTED_URL}, got '{url[:256]}', which cannot be resolved") from error
    return path


def _local_path(url: str) -> Path:
    path = url
    if _SCHEME.match(url):
        parts = urlsplit(url)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise NotSupported(f"{_EXPECTED_URL}, got '{url[:256]}'; remote models must be downloaded before")
        path = unquote(parts.path)
    if not path.startswith("/"):
        raise NotSupported(f"{_EXPECTED_URL}, got '{url[:256]}'")
    return Path(path)
