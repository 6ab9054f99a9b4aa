"""Deployments by model name and version, and the default version of each model."""

from typing import Any, TypeVar

from msgspec import structs

from dragoman.core.calls import Request
from dragoman.core.errors import ModelNotFound, PathNotFound
from dragoman.core.paths import match_handler
from dragoman.engine.deployment import Deployment

A = TypeVar("A")


class ModelRegistry:
    """Deployments by model name, then by version; version "" is that of a model without versions."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, Deployment]] = {}
        self._single: dict[str, Deployment] = {}  # of models with one version
        self._defaults: dict[str, str] = {}

    def names(self) -> list[str]:
        return sorted(self._models)

    def all(self) -> list[Deployment]:
        return [self._models[name][version] for name in self.names() for version in self.versions(name)]

    def default_versions(self) -> list[Deployment]:
        """Return the default version of each model."""
        return [self.find(name) for name in self.names() if self._models[name]]

    def versions(self, name: str) -> list[str]:
        """Return the versions of a model, oldest first; empty for an unknown model."""
        return sorted(self._models.get(name, {}), key=_version_key)

    def select(self, name: str, version: str = "") -> list[Deployment]:
        """Return all versions of a model, oldest first, or one of them. Raises ModelNotFound."""
        if version or name not in self._models:
            return [self.find(name, version)]
        return [self._models[name][each] for each in self.versions(name)]

    def default(self, name: str) -> str:
        """Return the configured default version, or ""."""
        return self._defaults.get(name, "")

    def put(
        self, name: str, versions: dict[str, Deployment], default: str = "", *, keep_others: bool = False
    ) -> list[Deployment]:
        """Set the versions of a model; with `keep_others` its other versions stay. Return the replaced deployments."""
        before = self._models.get(name, {})
        others = {v: d for v, d in before.items() if keep_others and v not in versions}
        self._models[name] = {**others, **versions}
        self._defaults[name] = default
        self._update_single(name)
        return [d for v, d in before.items() if v not in others]

    def remove(self, name: str, version: str = "") -> list[Deployment]:
        """Remove and return a model, or one version of it. Raises ModelNotFound."""
        removed = self.select(name, version)
        for deployment in removed:
            del self._models[name][deployment.spec.version]
        if not self._models[name]:
            del self._models[name]
            self._defaults.pop(name, None)
        self._update_single(name)
        return removed

    def _update_single(self, name: str) -> None:
        versions = [*self._models.get(name, {}).values()]
        if len(versions) == 1:
            self._single[name] = versions[0]
        else:
            self._single.pop(name, None)

    def find(self, name: str, version: str = "") -> Deployment:
        """Return the deployment of a model. Raises ModelNotFound.

        Without a version it is the configured one if it is loaded, else the newest that is ready, else the newest.
        """
        if not version and (single := self._single.get(name)) is not None:
            return single
        versions = self._models.get(name)
        if not versions:
            raise ModelNotFound(f"Request for unknown model: '{name}' is not found")
        default = self.default(name)
        deployment = versions.get(version or (default if default in versions else self._newest(name)))
        if deployment is None:
            existing = ", ".join(v for v in self.versions(name) if v) or "no versions"
            raise ModelNotFound(
                f"Request for unknown model: '{name}' version '{version}' is not found; there are {existing}"
            )
        return deployment

    def resolve_handler(self, request: Request[A]) -> Request[A]:
        """Return a request for a custom handler with the model that has the handler. Raises PathNotFound."""
        call: Any = request.call
        for deployment in self.default_versions():
            match = match_handler(deployment.handlers, call.method, call.path)
            if match is not None:
                handler, params = match
                call = structs.replace(call, handler=handler, params=params)
                return structs.replace(request, call=call, model=deployment.spec.name, version=deployment.spec.version)
        raise PathNotFound(f"no such path: {call.path[:256]}")

    def _newest(self, name: str) -> str:
        versions = self._models[name]
        if "" in versions:
            return ""
        sorted_versions = self.versions(name)
        return next((v for v in reversed(sorted_versions) if versions[v].state == "READY"), sorted_versions[-1])


def _version_key(version: str) -> tuple[bool, int, str]:
    """Return the sort key of a version: integers by value, after all others in alphabetical order."""
    return (True, int(version), version) if version.isdecimal() else (False, 0, version)
