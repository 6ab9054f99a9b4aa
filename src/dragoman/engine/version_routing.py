"""Which version answers requests that name none: by default one, or several in proportion to their weights (canary)."""

import logging
import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman.core.errors import InvalidInput, NotReady
from dragoman.core.metrics import Family, Sample
from dragoman.core.signature import Signature, TensorSpec
from dragoman.engine.deployment import Deployment

log = logging.getLogger("dragoman.engine")

_EXPECTED = "expected versions with numbers from 0, at least one above 0"


class VersionRouting(msgspec.Struct, frozen=True):
    """default_version: answers requests that name no version; "" stands for the newest.

    weights: relative shares of these requests by version, instead of a default version; empty for none.
    is_override: a load call has set the weights, instead of the model's settings.
    """

    default_version: str = ""
    weights: Mapping[str, float] = msgspec.field(default_factory=dict)
    is_override: bool = False

    def override(self, text: str) -> "VersionRouting":
        """Return the routing with weights such as "1=90,2=10"; "" removes them. Raises InvalidInput."""
        return replace(self, weights=_parse_text(text), is_override=True)

    def check_versions(self, model: str, known: Iterable[str]) -> None:
        """Raise InvalidInput if the default version or one with a weight is unknown, or the settings have both."""
        known = list(known)
        if self.default_version and self.weights and not self.is_override:
            raise InvalidInput(f"model '{model}': expected default_version or version_weights, got both")
        for setting, versions in (
            ("default_version", filter(None, [self.default_version])),
            ("version_weights: version", self.weights),
        ):
            for version in versions:
                if version not in known:
                    names = ", ".join(filter(None, known)) or "none"
                    raise InvalidInput(
                        f"model '{model}': {setting} '{version}' is not among the versions that are served: {names}"
                    )

    def check_compatible(self, versions: Mapping[str, Deployment]) -> None:
        """Raise InvalidInput if versions that share requests differ in what clients see of them.

        Versions that are not loaded are left out.
        """
        loaded = [d for v, w in self.weights.items() if w and (d := versions.get(v)) is not None and d.is_loaded]
        for other in loaded[1:]:
            for what, (expected, got) in _differences(loaded[0], other).items():
                if expected != got:
                    first, second = loaded[0].spec.version, other.spec.version
                    raise InvalidInput(
                        f"model '{other.spec.name}': version_weights: versions '{first}' and '{second}' differ in "
                        f"{what}: expected {_show(expected):.256}, got {_show(got):.256}; let clients name the version"
                    )


def parse_weights(value: Any, origin: str) -> dict[str, float]:
    """Return weights by version from a table. Raises InvalidInput."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{origin}: {_EXPECTED}, got {value!r:.256}")
    for version, weight in value.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not version or not is_number or not 0 <= weight < math.inf:
            raise InvalidInput(f"{origin}: {_EXPECTED}, got {weight!r:.64} for version '{version!s:.64}'")
    if value and not 0 < sum(value.values()) < math.inf:
        raise InvalidInput(f"{origin}: {_EXPECTED}, got {value!r:.256}")
    return dict(value)


def _parse_text(text: str) -> dict[str, float]:
    origin, weights = "parameter 'version_weights'", {}
    for item in filter(None, text.split(",")):
        version, _, weight = (part.strip() for part in item.partition("="))
        try:
            number = float(weight)
        except ValueError:
            number = -1.0
        if not version or version in weights or not 0 <= number < math.inf:
            raise InvalidInput(f"{origin}: expected text such as '1=90,2=10', got {text!r:.256}")
        weights[version] = number
    return parse_weights(weights, origin)


def _differences(first: Deployment, second: Deployment) -> dict[str, tuple[Any, Any]]:
    """Return the interfaces of two versions, by the names of their parts."""
    a, b = first.loaded, second.loaded
    options = ("open_inputs", "open_outputs", "decodes", "content_type", "unchecked")
    return {
        "inputs": (a.signature.inputs, b.signature.inputs),
        "outputs": _compared_outputs(a.signature, b.signature),
        **{option: (getattr(a.signature, option), getattr(b.signature, option)) for option in options},
        "supported calls": (sorted(c.__name__ for c in a.calls), sorted(c.__name__ for c in b.calls)),
        "streaming": (a.streams, b.streams),
        "handlers": (a.handlers, b.handlers),
        "settings of protocols": (first.spec.protocols, second.spec.protocols),
    }


def _compared_outputs(first: Signature, second: Signature) -> tuple[Any, Any]:
    """Return the outputs of two versions; their names, where files declare them and answers correct the rest."""
    if first.outputs_are_hints or second.outputs_are_hints:
        return first.output_names, second.output_names
    return first.outputs, second.outputs


def _show(value: Any) -> str:
    """Return a difference for a message."""
    if isinstance(value, TensorSpec):
        options = [option for option in ("accepts", "optional", "content_type", "columns") if getattr(value, option)]
        shown = [f"{option}={getattr(value, option)}" for option in options]
        return " ".join([f"'{value.name}' {value.datatype or 'any'} {list(value.shape or ('any rank',))}", *shown])
    return ", ".join(map(_show, value)) or "none" if isinstance(value, tuple | list) else str(value)


class WeightedVersions:
    """The loaded versions of one model with a weight above 0. Those that are not ready are left out of the shares."""

    def __init__(self, model: str, routing: VersionRouting, versions: Mapping[str, Deployment]) -> None:
        self._model = model
        self._routing = routing
        self._expected = [v for v, weight in routing.weights.items() if weight > 0]
        self._by_version = {v: versions[v] for v in self._expected if v in versions}
        self._versions = [(d, routing.weights[v]) for v, d in self._by_version.items()]
        self._ready: tuple[bool, ...] = ()
        self._limits: Sequence[float] = ()  # the weights of ready versions, added up
        self._is_reported = False

    def choose(self) -> Deployment:
        """Return a version at random in proportion to the weights of those that are ready.

        If none is ready, it is the one with the largest weight. Raises NotReady if none is loaded, if some are being
        loaded for the first time, or if they differ in what clients see of them.
        """
        ready = tuple([d.ready for d, _ in self._versions])
        if ready != self._ready:
            self._update(ready)
        total = self._limits[-1] if self._limits else 0.0
        if not total:
            return self.largest()
        return self._versions[bisect_right(self._limits, random.random() * total)][0]  # noqa: S311 - no secret

    @property
    def is_loaded(self) -> bool:
        """Whether there is a version with a weight, ready or not."""
        return bool(self._versions)

    def largest(self) -> Deployment:
        """Return the version with the largest weight, of the ready ones if there are any. Raises NotReady."""
        if not self._versions:
            raise NotReady(
                f"model '{self._model}': no version with a weight is loaded: expected {', '.join(self._expected)}; "
                "name a version, or set other version_weights"
            )
        return max(self._versions, key=lambda each: (each[0].ready, each[1]))[0]

    def shares(self) -> list[tuple[Deployment, float]]:
        """Return the share of requests that each version gets now, from 0 to 1."""
        weights = [w if d.ready else 0.0 for d, w in self._versions]
        total = sum(weights) or 1.0
        return [(d, weight / total) for (d, _), weight in zip(self._versions, weights, strict=True)]

    def _update(self, ready: tuple[bool, ...]) -> None:
        if loading := [(v, d) for v, d in self._by_version.items() if d.state == "LOADING"]:
            version, deployment = loading[0]
            text = f"model '{self._model}' is not ready: version '{version}' is being loaded"
            raise NotReady(text, deployment.retry_after_s)
        try:
            self._routing.check_compatible(self._by_version)
        except InvalidInput as error:  # found while they load, until they are closed for it
            raise NotReady(error.message) from error
        weights = [w if is_ready else 0.0 for (_, w), is_ready in zip(self._versions, ready, strict=True)]
        self._ready, self._limits = ready, [*accumulate(weights)]
        self._report()

    def _report(self) -> None:
        """Log the shares if versions are left out, and when that has ended."""
        is_complete = all(self._ready) and len(self._versions) == len(self._expected)
        if not is_complete or self._is_reported:
            shares = " ".join(f"{d.spec.version}={share:.4g}" for d, share in self.shares())
            log.warning("shares of versions changed, those that are not ready get 0: model=%s %s", self._model, shares)
        self._is_reported = not is_complete


def share_family(models: Iterable[WeightedVersions]) -> Iterable[Family]:
    """Return the metric of the shares of versions, if any model has weights."""
    name = "dragoman_version_share_ratio"
    samples = [
        Sample(name, {"model": d.spec.name, "version": d.spec.version}, share)
        for model in models
        for d, share in model.shares()
    ]
    if samples:
        help_text = "Share of the requests that name no version which a version gets; 0 while it is not ready."
        yield Family(name, "gauge", help_text, tuple(samples))
