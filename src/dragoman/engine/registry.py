"""The models by name and version, and which version answers when none is named."""

from typing import Any, TypeVar

from msgspec import structs

from dragoman.core.calls import Request
from dragoman.core.errors import ModelNotFound, PathNotFound
from dragoman.core.paths import matched
from dragoman.engine.deployment import Deployment

A = TypeVar("A")


class Registry:
    """Deployments by model name, then by version; version "" is that of a model without versions."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, Deployment]] = {}
        self._defaults: dict[str, str] = {}

    def names(self) -> list[str]:
        return sorted(self._models)

    def all(self) -> list[Deployment]:
        return [self._models[name][version] for name in self.names() for version in self.versions(name)]

    def served(self) -> list[Deployment]:
        """Of each model the version that answers where none is named."""
        return [self.find(name) for name in self.names() if self._models[name]]

    def versions(self, name: str) -> list[str]:
        """The versions of a model, oldest first; empty where there is no such model."""
        return sorted(self._models.get(name, {}), key=_age)

    def there(self, name: str, version: str = "") -> list[Deployment]:
        """The versions of a model, oldest first, or one of them; ModelNotFound where it is not in."""
        named = [version] if version else self.versions(name) or [""]
        return [self.find(name, each) for each in named]

    def default(self, name: str) -> str:
        """The version that was configured to answer where none is named, "" where none was."""
        return self._defaults.get(name, "")

    def put(
        self, name: str, versions: dict[str, Deployment], default: str = "", *, beside: bool = False
    ) -> list[Deployment]:
        """Put a model's versions in place of those that were there, or `beside` those that have other numbers.

        Those whose place it was are given back.
        """
        there = self._models.get(name, {})
        kept = {v: d for v, d in there.items() if beside and v not in versions}
        self._models[name] = {**kept, **versions}
        self._defaults[name] = default
        return [d for v, d in there.items() if v not in kept]

    def take(self, name: str, version: str = "") -> list[Deployment]:
        """Take a model, or one version of it, out; ModelNotFound where it is not in."""
        if version:
            found = self.find(name, version)
            del self._models[name][version]
        elif name not in self._models:
            raise ModelNotFound(f"Request for unknown model: '{name}' is not found")
        else:
            found = None
        if found is not None and self._models[name]:
            return [found]
        self._defaults.pop(name, None)
        rest = list(self._models.pop(name).values())
        return rest if found is None else [found]

    def find(self, name: str, version: str = "") -> Deployment:
        """The deployment that answers for a name; or ModelNotFound.

        Where no version is named: the configured one if it is there, else the newest that is ready, else the newest.
        """
        versions = self._models.get(name)
        if not versions:
            raise ModelNotFound(f"Request for unknown model: '{name}' is not found")
        if not version and len(versions) == 1:
            return next(iter(versions.values()))
        default = self.default(name)
        found = versions.get(version or (default if default in versions else self._newest(name)))
        if found is None:
            there = ", ".join(v for v in self.versions(name) if v) or "no versions"
            raise ModelNotFound(
                f"Request for unknown model: '{name}' version '{version}' is not found; there are {there}"
            )
        return found

    def addressed(self, request: Request[A]) -> Request[A]:
        """A call to a path of a model's own, with the model whose path it is; PathNotFound where it is nobody's."""
        call: Any = request.call
        for deployment in self.served():
            found = matched(deployment.handlers, call.method, call.path)
            if found is not None:
                handler, params = found
                call = structs.replace(call, handler=handler, params=params)
                return structs.replace(request, call=call, model=deployment.spec.name, version=deployment.spec.version)
        raise PathNotFound(f"no such path: {call.path[:256]}")

    def _newest(self, name: str) -> str:
        versions = self._models[name]
        if "" in versions:
            return ""
        by_age = self.versions(name)
        return next((v for v in reversed(by_age) if versions[v].state == "READY"), by_age[-1])


def _age(version: str) -> tuple[bool, int, str]:
    """Integers by value, after anything else by letter."""
    return (True, int(version), version) if version.isdecimal() else (False, 0, version)
