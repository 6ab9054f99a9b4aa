"""Deployments by model name and version, and the default version of each model."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import unquote

from msgspec import structs

from dragoman.core.calls import Embed, Generate, Request, Tokenize
from dragoman.core.dialect import OWN, Dialect
from dragoman.core.errors import ModelNameMissing, ModelNotFound, NotSupported, PathNotFound
from dragoman.core.paths import match_handler
from dragoman.core.spec import ModelSpec
from dragoman.engine.deployment import Deployment, dialect_of
from dragoman.engine.version_routing import VersionRouting, WeightedVersions

A = TypeVar("A")
_NEWEST = VersionRouting()
_MAX_NAMED = 5  # models in an error
_PATH_OF_MODEL = re.compile(r"/models/(?P<model>[^/]+)(?P<path>/.+)")  # of a handler of this model


class ModelRegistry:
    """Deployments by model name, then by version; version "" is that of a model without versions."""

    def __init__(self, dialect: Dialect = OWN) -> None:
        self._server_dialect = dialect
        self._dialects: dict[str, Dialect | None] = {}  # by model, also of those that are not loaded
        self._models: dict[str, dict[str, Deployment]] = {}
        self._single: dict[str, Deployment] = {}  # of models with one version
        self._routing: dict[str, VersionRouting] = {}
        self._weighted: dict[str, WeightedVersions] = {}  # of models with weights
        self._sorted: list[Deployment] | None = None  # `all`; a server with many models needs it at each change

    def names(self) -> list[str]:
        return sorted(self._models)

    def all(self) -> list[Deployment]:
        if self._sorted is None:
            self._sorted = [self._models[name][version] for name in self.names() for version in self.versions(name)]
        return [*self._sorted]

    def default_versions(self) -> list[Deployment]:
        """Return the default version of each model, if it has one."""
        weighted = self._weighted
        return [self.find(n) for n in self.names() if self._models[n] and (n not in weighted or weighted[n].is_loaded)]

    def versions(self, name: str) -> list[str]:
        """Return the versions of a model, oldest first; empty for an unknown model."""
        return sorted(self._models.get(name, {}), key=_version_key)

    def by_version(self, name: str) -> Mapping[str, Deployment]:
        """Return the deployments of a model; empty for an unknown model."""
        return self._models.get(name, {})

    def state_of(self, name: str) -> str:
        """Return the versions of a model with states, replicas and weights, such as `1=READY*2@90,2=READY@10`."""
        weights, by_version = self.routing(name).weights, self.by_version(name)
        return ",".join(
            (f"{version}=" if version else "")
            + by_version[version].state
            + (f"*{by_version[version].spec.replicas}" if by_version[version].spec.replicas > 1 else "")
            + (f"@{weights[version]:g}" if version in weights else "")
            for version in self.versions(name)
        )

    def select(self, name: str, version: str = "") -> list[Deployment]:
        """Return all versions of a model, oldest first, or one of them. Raises ModelNotFound."""
        if version or name not in self._models:
            return [self.find(name, version)]
        return [self._models[name][version] for version in self.versions(name)]

    def routing(self, name: str) -> VersionRouting:
        """Return which version answers requests that name none."""
        return self._routing.get(name, _NEWEST)

    def set_routing(self, name: str, routing: VersionRouting) -> None:
        """Change which version answers requests that name none. Raises InvalidInput if it is not possible."""
        versions = self._models.get(name, {})
        routing.check_versions(name, versions)
        routing.check_compatible(versions)
        self._routing[name] = routing
        self._update(name)

    def weighted_versions(self) -> list[WeightedVersions]:
        """Return the models whose versions have weights."""
        return [self._weighted[name] for name in sorted(self._weighted)]

    def put(
        self,
        name: str,
        versions: dict[str, Deployment],
        routing: VersionRouting = _NEWEST,
        *,
        keep_others: bool = False,
    ) -> list[Deployment]:
        """Set the versions of a model; with `keep_others` its other versions stay. Return the replaced deployments."""
        self.note_dialects({name: [d.spec for d in versions.values()]})
        before = self._models.get(name, {})
        others = {v: d for v, d in before.items() if keep_others and v not in versions}
        self._models[name] = {**others, **versions}
        self._routing[name] = routing
        self._update(name)
        return [d for v, d in before.items() if self._models[name].get(v) is not d]

    def remove(self, name: str, version: str = "") -> list[Deployment]:
        """Remove and return a model, or one version of it. Raises ModelNotFound."""
        removed = self.select(name, version)
        for deployment in removed:
            del self._models[name][deployment.spec.version]
        if not self._models[name]:
            del self._models[name]
            self._routing.pop(name, None)
        self._update(name)
        return removed

    def _update(self, name: str) -> None:
        """Derive what depends on the versions of a model and their weights."""
        versions, weights = self._models.get(name, {}), self.routing(name).weights
        self._sorted = None
        self._single.pop(name, None)
        self._weighted.pop(name, None)
        if weights:
            self._weighted[name] = WeightedVersions(name, self.routing(name), versions)
        elif len(versions) == 1:
            (self._single[name],) = versions.values()

    def route(self, name: str, version: str = "") -> Deployment:
        """Return the deployment for one call: chosen by weights if it names no version and the model has some.

        Raises ModelNotFound, and NotReady if no version with a weight is loaded.
        """
        if not version:
            if (single := self._single.get(name)) is not None:
                return single
            if (weighted := self._weighted.get(name)) is not None:
                return weighted.choose()
        return self.find(name, version)

    def name_versions(self, requests: Iterable[Request[Any]]) -> list[Request[Any]]:
        """Return requests that are one for the client so that one version of each model answers them."""
        versions: dict[str, str] = {}
        named = []
        for request in requests:
            if request.model in self._weighted and not request.version:
                version = versions.get(request.model) or self.route(request.model).spec.version
                request = structs.replace(request, version=versions.setdefault(request.model, version))
            named.append(request)
        return named

    def find(self, name: str, version: str = "") -> Deployment:
        """Return the deployment of a model, for its metadata and state. Raises ModelNotFound and NotReady.

        Without a version it is the one with the largest weight, else the configured one if it is loaded, else the
        newest that is ready, else the newest.
        """
        if not version and (single := self._single.get(name)) is not None:
            return single
        versions = self._models.get(name)
        if not versions:
            raise ModelNotFound(self.unknown(name, version))
        if not version and (weighted := self._weighted.get(name)) is not None:
            return weighted.largest()
        default = self.routing(name).default_version
        deployment = versions.get(version or (default if default in versions else self._newest(name)))
        if deployment is None:
            raise ModelNotFound(self.unknown(name, version))
        return deployment

    def note_dialects(self, specs: Mapping[str, Iterable[ModelSpec]]) -> None:
        """Remember the dialects of models, for errors and control requests when they are not loaded."""
        self._dialects |= {name: dialect_of(spec) for name, versions in specs.items() for spec in versions}

    def dialect_of(self, name: str) -> Dialect:
        """Return the dialect of errors about a model, which may not exist: its own if the server has one, else ours.

        The name of an unknown model says nothing about its clients: with models of several dialects it is ours.
        """
        server = self._server_dialect
        if server == OWN:
            return OWN
        if name in self._dialects:
            return self._dialects[name] or server
        return server if {*self._dialects.values()} <= {None, server} else OWN

    def unknown(self, name: str, version: str = "") -> str:
        """Return the text of the error for a model or version that is not served."""
        return self.dialect_of(name).unknown(name, version, self.versions(name))

    def resolve_adapter(self, request: Request[A], error: ModelNotFound) -> Request[A]:
        """Return a request for text or tokens that names an adapter instead of a model, with its model.

        Raises the error if no model, or several, have an adapter of this name.
        """
        call: Any = request.call
        name = request.model
        models = {d.spec.name for d in self.all() if d.is_loaded and name in d.loaded.details.get("adapters", ())}
        if not isinstance(call, Generate | Tokenize) or len(models) != 1:
            raise self._with_models(error, request) from None
        if isinstance(call, Generate):
            call = structs.replace(call, sampling=replace(call.sampling, adapter=name, adapters=()))
        return structs.replace(request, model=models.pop(), call=call, models=None)

    def _with_models(self, error: ModelNotFound, request: Request[Any]) -> ModelNotFound:
        """Return the error of an unknown model of a text API with the models that the caller may name instead."""
        if request.model in self._models:
            return error
        return ModelNotFound(f"{error.message}{self._able_models(request, Generate | Tokenize | Embed)}")

    def with_able_models(self, error: NotSupported, request: Request[Any]) -> NotSupported:
        """Return the error of a model without embeddings with the models that have them."""
        if self.find(request.model, request.version).answers(type(request.call)):
            return error
        return NotSupported(f"{error.message}{self._able_models(request, Embed)}")

    def _able_models(self, request: Request[Any], kinds: Any) -> str:
        """Return "; there are " and the models that answer a call of these kinds, for errors; "" if there are none."""
        answering = {deployment.spec.name for deployment in self.all() if deployment.answers(type(request.call))}
        names = sorted(name for name in answering if request.models is None or name in request.models)
        if not isinstance(request.call, kinds) or not names or self.dialect_of(request.model) != OWN:
            return ""
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        return f"; there are {', '.join(names[:_MAX_NAMED])}{more}"

    def resolve_handler(self, request: Request[A]) -> Request[A]:
        """Return a request for a custom handler with the model that has the handler.

        The path of a request that names no model may begin with `/models/NAME`. Raises PathNotFound, and
        ModelNameMissing if several models have a handler for the path.
        """
        call: Any = request.call
        named = request.model
        deployments = [self.find(named, request.version)] if named else list(self.default_versions())
        found = _with_handler(deployments, call.method, call.path)
        if not found and not named and (match := _PATH_OF_MODEL.fullmatch(call.path)):
            call = structs.replace(call, path=match["path"])
            deployments = [d for d in deployments if d.spec.name == unquote(match["model"])]
            found = _with_handler(deployments, call.method, call.path)
        if not found:
            raise PathNotFound(f"no such path: {request.call.path[:256]}")  # type: ignore[attr-defined]
        allowed = [match for match in found if request.models is None or match[0].name in request.models]
        if len(allowed) > 1:
            names = sorted(spec.name for spec, *_ in allowed)
            shown = ", ".join(names[:_MAX_NAMED])
            raise ModelNameMissing(
                f"several models answer {call.path[:256]}: {shown}; name one, as in /models/{names[0]}{call.path[:256]}"
            )
        spec, handler, params = (allowed or found)[0]
        version = "" if spec.name in self._weighted else spec.version
        call = structs.replace(call, handler=handler, params=params)
        return structs.replace(request, call=call, model=spec.name, version=version)

    def _newest(self, name: str) -> str:
        versions = self._models[name]
        if "" in versions:
            return ""
        sorted_versions = self.versions(name)
        return next((v for v in reversed(sorted_versions) if versions[v].state == "READY"), sorted_versions[-1])


def _with_handler(
    deployments: Iterable[Deployment], method: str, path: str
) -> list[tuple[ModelSpec, str, Mapping[str, str]]]:
    """Return the models that have a handler for a path, each with the handler and the parameters of the path."""
    matches = ((deployment.spec, match_handler(deployment.handlers, method, path)) for deployment in deployments)
    return [(spec, *match) for spec, match in matches if match is not None]


def _version_key(version: str) -> tuple[bool, int, str]:
    """Return the sort key of a version: integers by value, after all others in alphabetical order."""
    return (True, int(version), version) if version.isdecimal() else (False, 0, version)


def is_current(deployment: Deployment | None, spec: ModelSpec, old: Mapping[str, ModelSpec]) -> bool:
    """Return whether a deployment was loaded from what is on disk now; its replicas may have been scaled since."""
    if deployment is None:
        return False
    loaded = deployment.spec
    return loaded == spec or (old.get(spec.version) == spec and replace(loaded, replicas=spec.replicas) == spec)
