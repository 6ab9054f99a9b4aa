"""Finds models on disk: a file, a folder of versions, a folder of models, or `module:object`."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dragoman import plugins
from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.spec import ModelSpec, check_name
from dragoman.engine import model_files
from dragoman.engine.model_places import model_place

# `package.module:object` or `any folder/file.py:object`.
_OBJECT = re.compile(r"(?:[A-Za-z_][\w.]*|.+\.py):[A-Za-z_][\w.]*")
_POLICY = re.compile(r"latest|all|\d+(?:\s*,\s*\d+)*")
_PASSED_OVER = {"__pycache__", "node_modules"}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from: `specs()` gives its versions that are to be served, as things are now.

    `default_version` answers when none is named; "" is the newest.
    """

    specs: Callable[[], list[ModelSpec]]
    default_version: str = ""


class Repository:
    """Where the engine finds its models: here a fixed list of specs."""

    def __init__(self, specs: Sequence[ModelSpec] = ()) -> None:
        self._fixed = tuple(specs)
        seen: set[tuple[str, str]] = set()
        for spec in specs:
            if (spec.name, spec.version) in seen:
                raise InvalidInput(f"two models are called '{spec.name}'; give one of them another name")
            seen.add((spec.name, spec.version))

    def scan(self) -> dict[str, Source]:
        """Every model that may be loaded, by name. Raises InvalidInput where what is there makes no sense."""
        names = dict.fromkeys(s.name for s in self._fixed)
        return {n: Source(lambda n=n: [s for s in self._fixed if s.name == n]) for n in names}  # type: ignore[misc]

    def at(self, name: str, url: str) -> Source:
        """A model that lies elsewhere, as one of that name. Raises Forbidden, NotSupported or InvalidInput."""
        raise NotSupported("models are loaded from the server's own repository alone; expected no `url`")


@dataclass(frozen=True, slots=True)
class _Found:
    """A model on disk: where it lies and what the files beside it say of it."""

    name: str
    path: Path | None
    settings: Mapping[str, Any]
    versions: Mapping[str, Path]
    fault: InvalidInput | None = None  # what its files say makes no sense


class DiskRepository(Repository):
    """Models below some paths, beside fixed ones. Each scan looks at the disk anew, to find what has changed.

    `defaults` are fields of a ModelSpec for every model; `version_policy` is latest, all, or a list as `1,3`. What lies
    below one of `folders` may be loaded too, where somebody says where.
    """

    def __init__(
        self,
        paths: Sequence[str],
        defaults: Mapping[str, Any],
        version_policy: str = "latest",
        live: Sequence[ModelSpec] = (),
        folders: Sequence[str] = (),
    ) -> None:
        super().__init__(live)
        self._paths = tuple(paths)
        self._defaults = dict(defaults)
        self._version_policy = _checked_policy(version_policy)
        self._folders = tuple(folders)

    def scan(self) -> dict[str, Source]:
        sources = super().scan()
        by_name: dict[str, list[_Found]] = {}
        for path in self._paths:
            for found in _looked(path):
                check_name(found.name, f"the model name of '{found.path or path}'")
                same = by_name.setdefault(found.name, [])
                if found.name in sources or not _are_versions([*same, found]):
                    raise InvalidInput(f"two models are called '{found.name}'; the second is {found.path or path}")
                same.append(found)
        return sources | {name: self._source(same) for name, same in by_name.items()}

    def at(self, name: str, url: str) -> Source:
        there = _looked(str(model_place(url, self._folders)))
        if len(there) != 1:
            names = ", ".join(found.name for found in there)
            raise InvalidInput(f"`url`: expected one model, found several in '{url}': {names[:256]}")
        found = self._source([replace(there[0], name=name)])
        return Source(lambda: [replace(spec, url=url) for spec in found.specs()], found.default_version)

    def _source(self, same: Sequence[_Found]) -> Source:
        default = next((str(f.settings["default_version"]) for f in same if "default_version" in f.settings), "")

        def specs() -> list[ModelSpec]:
            found = [spec for each in same for spec in self._specified(each)]
            _check_default(default, found)
            return found

        return Source(specs, default)

    def _specified(self, found: _Found) -> list[ModelSpec]:
        if found.fault is not None:
            raise found.fault
        given = {k: v for k, v in found.settings.items() if k not in ("version_policy", "default_version")}
        base = ModelSpec(**{**self._defaults, **given, "name": found.name})
        if not found.versions:
            return [_placed(base, found.path)]
        policy = _checked_policy(str(found.settings.get("version_policy", self._version_policy)))
        chosen = _chosen(sorted(found.versions, key=int), policy, found.name)
        return [_placed(replace(base, version=v, uri=""), found.versions[v]) for v in chosen]


def _are_versions(same: Sequence[_Found]) -> bool:
    """Whether these, of one name, are one model: alone, or each with a version of its own in its settings."""
    told = [found.settings.get("version", "") for found in same]
    return len(same) == 1 or (len({*told}) == len(same) and not any(found.versions for found in same))


def _checked_policy(policy: str) -> str:
    if not _POLICY.fullmatch(policy):
        raise InvalidInput(f"version policy '{policy}': expected latest, all, or a list of versions as 1,3")
    return policy


def _chosen(versions: list[str], policy: str, name: str) -> list[str]:
    if policy == "all":
        return versions
    if policy == "latest":
        return versions[-1:]
    listed = [v.strip() for v in policy.split(",")]
    missing = [v for v in listed if v not in versions]
    if missing:
        raise InvalidInput(
            f"model '{name}': version policy '{policy}' wants {', '.join(missing)}, there are {', '.join(versions)}"
        )
    return [v for v in versions if v in listed]


def _check_default(default: str, served: Sequence[ModelSpec]) -> None:
    versions = [spec.version for spec in served]
    if default and default not in versions:
        there = ", ".join(filter(None, versions)) or "none"
        raise InvalidInput(
            f"model '{served[0].name}': default_version '{default}' is not among the versions that are served: {there}"
        )


def _placed(spec: ModelSpec, path: Path | None) -> ModelSpec:
    """The spec with its file and runtime: as said beside the model, else as the file itself tells."""
    if path is None or ":" in spec.uri:
        return replace(spec, runtime=spec.runtime or "python", uri=spec.uri or str(path))
    file = (path / spec.uri) if spec.uri else path
    if file.is_dir() and _recognise(file) is None:
        file = plugins.resolve("dragoman.runtimes.recognise:model_file")(file) or file
    runtime = spec.runtime or _recognise(file)
    if runtime is None and not file.exists():
        raise InvalidInput(f"model '{spec.name}': there is no file '{file}'; expected the path of the model's file")
    if runtime is None:
        why = _why_not(file) or f"no runtime is known for {file}; name one as `runtime`"
        raise InvalidInput(f"model '{spec.name}': {why}")
    return replace(spec, runtime=runtime, uri=str(file))


def _looked(path: str) -> list[_Found]:
    """The models at a path. Raises InvalidInput where there are none."""
    there = list(_look(path))
    if not there:
        likely = [p for p in _visible(Path(path)) if p.stem == "model" or p.suffix in (".pt", ".pth")]
        told = "expected a model file, a folder of models or module:object"
        raise InvalidInput(f"found no model in '{path}'; {next(filter(None, map(_why_not, likely)), told)}")
    return there


def _look(path: str) -> Iterator[_Found]:
    place = Path(path)
    if _OBJECT.fullmatch(path) and not place.exists():
        name = path.rpartition(":")[2].rpartition(".")[2]
        yield _Found(name, None, {"runtime": "python", "uri": path}, {})
    elif place.is_dir():
        settings = model_files.environment_settings(place.resolve())
        if settings is None:
            yield from _look_in(place.resolve())
        else:
            yield _Found(settings.get("name") or _name(place.resolve()), place.resolve(), settings, {})
    elif place.is_file():
        if _recognise(place) is None:
            told = f"no runtime is known for the file '{path}'; expected a model file that docs/serving.md lists, or a "
            raise InvalidInput(_why_not(place) or told + "folder with it and a dragoman.toml that names its runtime")
        yield _Found(_name(place), place.resolve(), {}, {})
    else:
        raise InvalidInput(f"'{path}' is not there; expected a model file, a folder of models or module:object")


def _look_below(folder: Path, above: frozenset[Path]) -> Iterator[_Found]:
    """As `_look_in`, for one of several folders: its fault is its own, and a link back up leads nowhere."""
    real = folder.resolve()
    if real in above:
        return
    try:
        yield from _look_in(folder, above | {real})
    except (InvalidInput, OSError) as fault:
        told = fault if isinstance(fault, InvalidInput) else InvalidInput(f"{folder} cannot be read: {fault}")
        yield _Found(folder.name, folder, {}, {}, told)


def _look_in(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[_Found]:
    above = above or frozenset({folder.resolve()})
    settings = model_files.model_settings(folder)
    folders = [p for p in _visible(folder) if p.is_dir()]
    versions = {p.name: p for p in folders if p.name.isdecimal() and not _described(p)}
    if settings is not None or versions or _recognise(folder) is not None:
        settings = settings or {}
        versions = {} if "uri" in settings else versions
        yield _Found(settings.get("name") or _name(folder), folder, settings, versions)
        if _described(folder):  # MLServer: every model-settings.json is a model, wherever it lies
            yield from (found for p in folders for found in _described_below(p))
        return
    files = [p for p in _visible(folder) if p.is_file() and p.suffix != ".py" and _recognise(p) is not None]
    below = [found for p in folders for found in _look_below(p, above)]
    if len(files) == 1 and not below:
        yield _Found(_name(folder), files[0], {}, {})
        return
    overrides = model_files.repository_settings(folder)
    for found in [*(_Found(_name(p), p, {}, {}) for p in files), *below]:
        yield replace(found, settings={**found.settings, **overrides.pop(found.name, {})})
    if overrides:
        raise InvalidInput(f"{folder / 'dragoman.toml'}: there is no model {', '.join(map(repr, overrides))} here")


def _described(folder: Path) -> bool:
    return (folder / "model-settings.json").is_file()


def _described_below(folder: Path) -> Iterator[_Found]:
    if _described(folder):
        yield from _look_in(folder)
    else:
        yield from (found for p in _visible(folder) if p.is_dir() for found in _described_below(p))


def _visible(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p.name not in _PASSED_OVER)


def _name(path: Path) -> str:
    """What a file or folder is called where nothing beside it says so; a graph may say so itself."""
    if _recognise(path) == "graph":
        name: str = plugins.resolve("dragoman.runtimes.graph_files:graph_name")(path)
        return name
    return path.name if path.is_dir() else path.stem


def _why_not(path: Path) -> str:
    found: str = plugins.resolve("dragoman.runtimes.recognise:why_not")(path)
    return found


def _recognise(path: Path) -> str | None:
    recognise: Callable[[Path], str | None] = plugins.resolve("dragoman.runtimes.recognise:recognise")
    return recognise(path)
