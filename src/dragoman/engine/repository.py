"""The models that a server may load: below some paths, as things are on disk now, and live ones."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.spec import ModelSpec, check_name
from dragoman.engine.model_urls import model_path
from dragoman.engine.search import Found, Search, Skipped
from dragoman.runtimes.recognise import model_file, recognise, why_not

_POLICY = re.compile(r"latest|all|\d+(?:\s*,\s*\d+)*")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from: `specs()` gives its versions that are to be served, as things are now.

    `default_version` answers when none is named; "" is the newest.
    """

    specs: Callable[[], list[ModelSpec]]
    default_version: str = ""


class Repository:
    """Where the engine finds its models: here a fixed list of specs. `skipped` are files that the last scan found and
    that are not served."""

    skipped: Sequence[Skipped] = ()

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


class DiskRepository(Repository):
    """Models below some paths, beside fixed ones. Each scan looks at the disk anew, to find what has changed.

    `defaults` are fields of a ModelSpec for every model; `version_policy` is latest, all, or a list as `1,3`. What lies
    below one of `folders` may be loaded too, where somebody says where. `run_code`: see `Search`.
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
    ) -> None:
        super().__init__(live)
        self._paths = tuple(paths)
        self._defaults = dict(defaults)
        self._version_policy = _checked_policy(version_policy)
        self._folders = tuple(folders)
        self._run_code = run_code

    def scan(self) -> dict[str, Source]:
        sources = super().scan()
        by_name: dict[str, list[Found]] = {}
        search = Search(self._run_code)
        for path in self._paths:
            for found in search.models(path):
                check_name(found.name, f"the model name of '{_place(found)}'")
                same = by_name.setdefault(found.name, [])
                if found.name in sources or not _are_versions([*same, found]):
                    first = _place(same[0]) if same else "a Python object"
                    raise InvalidInput(
                        f"two models are called '{found.name}': {first} and {_place(found)}; give one of them another "
                        "name, as `name` in a dragoman.toml in a folder of its own"
                    )
                same.append(found)
        self.skipped = tuple(search.skipped)
        return sources | {name: self._source(same) for name, same in by_name.items()}

    def at(self, name: str, url: str) -> Source:
        there = Search(self._run_code).models(str(model_path(url, self._folders)))
        if len(there) != 1:
            names = ", ".join(found.name for found in there)
            raise InvalidInput(f"`url`: expected one model, found several in '{url}': {names[:256]}")
        found = self._source([replace(there[0], name=name)])
        return Source(lambda: [replace(spec, url=url) for spec in found.specs()], found.default_version)

    def _source(self, same: Sequence[Found]) -> Source:
        default = next((str(f.settings["default_version"]) for f in same if "default_version" in f.settings), "")

        def specs() -> list[ModelSpec]:
            found = [spec for each in same for spec in self._specified(each)]
            _check_default(default, found)
            return found

        return Source(specs, default)

    def _specified(self, found: Found) -> list[ModelSpec]:
        if found.error is not None:
            raise found.error
        given = {k: v for k, v in found.settings.items() if k not in ("version_policy", "default_version")}
        base = ModelSpec(**{**self._defaults, **given, "name": found.name})
        if not found.versions:
            return [_placed(base, found.path)]
        policy = _checked_policy(str(found.settings.get("version_policy", self._version_policy)))
        chosen = _chosen(sorted(found.versions, key=int), policy, found.name)
        return [_placed(replace(base, version=v, uri=""), found.versions[v]) for v in chosen]


def _place(found: Found) -> str:
    """Where a model lies, for a message."""
    return str(found.path or found.settings["uri"])


def _are_versions(same: Sequence[Found]) -> bool:
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
    if file.is_dir() and recognise(file) is None:
        file = model_file(file) or file
    runtime = spec.runtime or recognise(file)
    if runtime is None and not file.exists():
        raise InvalidInput(f"model '{spec.name}': there is no file '{file}'; expected the path of the model's file")
    if runtime is None:
        why = why_not(file) or f"no runtime is known for {file}; name one as `runtime`"
        raise InvalidInput(f"model '{spec.name}': {why}")
    return replace(spec, runtime=runtime, uri=str(file))
