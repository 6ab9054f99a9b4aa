"""Clauses of the UM-Bridge protocol."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dragoman.core.documents import parse_json
from dragoman_check.conformance.clauses import ClauseList, NotOffered, NotTried, Protocol, expect, field_of
from dragoman_check.conformance.http import HttpTarget, RecordedResponse
from dragoman_check.conformance.target import Target

_UNKNOWN = "dragoman-check-unknown"
_FEATURES = ("Evaluate", "Gradient", "ApplyJacobian", "ApplyHessian")
# Coordinates that are tried in turn until the model can be evaluated.
_COORDINATES = (1.0, 0.5, 0.0, 10.0)

CLAUSES = ClauseList("umbridge")
_add = CLAUSES.add


@dataclass(slots=True)
class Function:
    """The model under test: what it supports, its sizes, and a point where it can be evaluated."""

    http: HttpTarget
    name: str
    config: Mapping[str, Any]
    point: list[list[float]] = field(default_factory=list)

    def post(self, endpoint: str, **fields: Any) -> RecordedResponse:
        return self.http.post(f"/{endpoint}", {"name": self.name, "config": self.config} | fields)

    def sizes(self, kind: str) -> list[int]:
        key = f"{kind}Sizes"
        values: list[int] = field_of(self.post(f"{kind.capitalize()}Sizes").ok().json(), key, list)
        expect(all(type(n) is int and n >= 0 for n in values), f"non-negative integers in {key}", values)
        return values

    def supports(self, feature: str) -> bool:
        answer = self.http.post("/ModelInfo", {"name": self.name}).ok().json()
        supported: bool = field_of(field_of(answer, "support", dict), feature, bool, "'support'")
        return supported

    def require(self, feature: str) -> None:
        if not self.supports(feature):
            raise NotOffered(f"/ModelInfo says that {feature} is not supported")
        if not self.point:
            raise NotTried("the model cannot be evaluated at the points tried; give one with --at")

    def derivative(self, feature: str, **changes: Any) -> RecordedResponse:
        """Send a derivative request of the first output and input, with vectors of ones."""
        ones = {"sens": [1.0] * self.sizes("output")[0], "vec": [1.0] * self.sizes("input")[0]}
        index = {"inWrt1": 0, "inWrt2": 0} if feature == "ApplyHessian" else {"inWrt": 0}
        vectors = {"Gradient": ("sens",), "ApplyJacobian": ("vec",)}.get(feature, ("sens", "vec"))
        fields = {"outWrt": 0, "input": self.point, **index, **{name: ones[name] for name in vectors}}
        return self.post(feature, **(fields | changes))

    def vector(self, feature: str, **changes: Any) -> list[float]:
        values = field_of(self.derivative(feature, **changes).ok().json(), "output", list)
        return _numbers(values, "'output'")


def _prepare(target: Target) -> Function:
    response = target.http.get("/Info")
    if response.status != 200:
        raise NotOffered(f"GET /Info gets status {response.status}")
    answer = parse_json(response.body)
    listed = answer.get("models") if isinstance(answer, dict) else None
    if listed == []:
        raise NotTried("GET /Info lists no models")
    names = [name for name in target.models or listed or [""] if not listed or name in listed]
    if not names:
        raise NotTried(f"GET /Info lists none of the models {', '.join(target.models)}")
    functions = [Function(target.http, name, target.config) for name in names]
    for function in functions:
        function.point = _valid_point(function, target.point)
    return max(functions, key=_ability)


def _ability(function: Function) -> int:
    """Return the number of features of a function that can be evaluated."""
    support = parse_json(function.http.post("/ModelInfo", {"name": function.name}).body or b"{}").get("support", {})
    return sum(map(bool, support.values())) if function.point else -1


def _valid_point(function: Function, given: Sequence[Sequence[float]] | None) -> list[list[float]]:
    """Return a point where the model can be evaluated, or an empty list."""
    response = function.post("InputSizes")
    sizes = parse_json(response.body).get("inputSizes", []) if response.status == 200 else []
    points = [[list(v) for v in given]] if given else [[[x] * int(n) for n in sizes] for x in _COORDINATES]
    return next((p for p in points if p and function.post("Evaluate", input=p).status == 200), [])


def _numbers(values: Any, what: str) -> list[float]:
    expect(
        isinstance(values, list) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values),
        f"a list of numbers in {what}",
        values,
    )
    numbers: list[float] = values
    return numbers


def _check_error(response: RecordedResponse, kind: str, status: int = 400) -> None:
    expect(response.status == status, f"status {status}", f"{response.status} {response.body[:160]!r}")
    error = field_of(response.json(), "error", dict)
    expect(field_of(error, "type", str, "'error'") == kind, f"the error type {kind}", error["type"])
    expect(field_of(error, "message", str, "'error'").strip(), "a message", error)


# --- description of the server and its models --------------------------------------------------------------------


@_add("info", "GET /Info")
def _info(c: Function) -> None:
    """GET /Info returns protocolVersion and the names of the models."""
    answer = c.http.get("/Info").ok().json()
    version = field_of(answer, "protocolVersion", (int, float, str))
    expect(str(version) in ("1.0", "1"), "protocolVersion 1.0", version)
    models = field_of(answer, "models", list)
    expect(models and all(isinstance(name, str) for name in models), "names of models", models)


@_add("model-info", "POST /ModelInfo")
def _model_info(c: Function) -> None:
    """POST /ModelInfo returns a boolean for each feature."""
    for feature in _FEATURES:
        c.supports(feature)


@_add("input-sizes", "POST /InputSizes")
def _input_sizes(c: Function) -> None:
    """POST /InputSizes returns the sizes of the input vectors."""
    c.sizes("input")


@_add("output-sizes", "POST /OutputSizes")
def _output_sizes(c: Function) -> None:
    """POST /OutputSizes returns the sizes of the output vectors."""
    c.sizes("output")


@_add("config-optional", "POST /InputSizes")
def _config_optional(c: Function) -> None:
    """'config' may be left out."""
    response = c.http.post("/InputSizes", {"name": c.name})
    if c.config and response.status == 400:
        raise NotTried("the model needs the given config")
    field_of(response.ok().json(), "inputSizes", list)


@_add("no-content-type", "Protocol", level="should")
def _no_content_type(c: Function) -> None:
    """Requests without a content type are accepted, as the reference clients send them."""
    response = c.http.post("/InputSizes", json.dumps({"name": c.name, "config": c.config}).encode(), headers={})
    field_of(response.ok().json(), "inputSizes", list)


# --- evaluation and derivatives ----------------------------------------------------------------------------------


@_add("evaluate", "POST /Evaluate")
def _evaluate(c: Function) -> None:
    """POST /Evaluate returns vectors of the sizes that /OutputSizes declares."""
    c.require("Evaluate")
    output = field_of(c.post("Evaluate", input=c.point).ok().json(), "output", list)
    sizes = c.sizes("output")
    output_sizes = [len(_numbers(vector, "an output vector")) for vector in output]
    expect(output_sizes == sizes, f"vectors of {sizes} numbers", output_sizes)


@_add("gradient", "POST /Gradient")
def _gradient(c: Function) -> None:
    """POST /Gradient returns a vector as long as the input."""
    c.require("Gradient")
    gradient = c.vector("Gradient")
    expect(len(gradient) == c.sizes("input")[0], f"{c.sizes('input')[0]} numbers", len(gradient))


@_add("apply-jacobian", "POST /ApplyJacobian")
def _apply_jacobian(c: Function) -> None:
    """POST /ApplyJacobian returns a vector as long as the output."""
    c.require("ApplyJacobian")
    product = c.vector("ApplyJacobian")
    expect(len(product) == c.sizes("output")[0], f"{c.sizes('output')[0]} numbers", len(product))


@_add("apply-hessian", "POST /ApplyHessian")
def _apply_hessian(c: Function) -> None:
    """POST /ApplyHessian returns a vector as long as the first input."""
    c.require("ApplyHessian")
    product = c.vector("ApplyHessian")
    expect(len(product) == c.sizes("input")[0], f"{c.sizes('input')[0]} numbers", len(product))


@_add("adjoint", "POST /Gradient, POST /ApplyJacobian")
def _adjoint(c: Function) -> None:
    """Gradient and ApplyJacobian belong to the same Jacobian: <J v, s> = <v, Jᵀ s>."""
    c.require("Gradient")
    c.require("ApplyJacobian")
    vec = [1.0 + 0.5 * i for i in range(c.sizes("input")[0])]
    sens = [1.0 - 0.25 * i for i in range(c.sizes("output")[0])]
    left = _dot(c.vector("ApplyJacobian", vec=vec), sens)
    right = _dot(vec, c.vector("Gradient", sens=sens))
    scale = max(abs(left), abs(right), 1e-12)
    expect(abs(left - right) <= 1e-4 * scale, f"<v, Jᵀ s> = {left:.6g}", f"{right:.6g}")


@_add("directional-derivative", "POST /ApplyJacobian")
def _directional_derivative(c: Function) -> None:
    """ApplyJacobian agrees with differences of Evaluate to 1 %."""
    c.require("Evaluate")
    c.require("ApplyJacobian")
    vec, step = [1.0] * c.sizes("input")[0], 1e-5
    ends = []
    for sign in (1.0, -1.0):
        moved = [[x + sign * step * v for x, v in zip(c.point[0], vec, strict=True)], *c.point[1:]]
        ends.append(field_of(c.post("Evaluate", input=moved).ok().json(), "output", list)[0])
    slopes = [(a - b) / (2 * step) for a, b in zip(*ends, strict=True)]
    product = c.vector("ApplyJacobian", vec=vec)
    size = math.sqrt(_dot(slopes, slopes)) + 1e-6
    error = math.dist(slopes, product)
    expect(error <= 0.01 * size, f"J v near {slopes[:4]}", product[:4])


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


# --- errors ------------------------------------------------------------------------------------------------------


@_add("unknown-model", "Errors, ModelNotFound")
def _unknown_model(c: Function) -> None:
    """An unknown model gets status 400 and the error ModelNotFound at each endpoint."""
    for endpoint in ("InputSizes", "OutputSizes", "ModelInfo"):
        _check_error(c.http.post(f"/{endpoint}", {"name": _UNKNOWN, "config": {}}), "ModelNotFound")
    _check_error(c.post("Evaluate", name=_UNKNOWN, input=c.point or [[0.0]]), "ModelNotFound")


@_add("unsupported-feature", "Errors, UnsupportedFeature")
def _unsupported_feature(c: Function) -> None:
    """A feature that the model does not support gets status 400 and the error UnsupportedFeature."""
    missing = [feature for feature in _FEATURES[1:] if not c.supports(feature)]
    if not missing:
        raise NotTried("the model supports every feature")
    for feature in missing:
        _check_error(
            c.derivative(feature, input=c.point or [[1.0] * n for n in c.sizes("input")]), "UnsupportedFeature"
        )


@_add("number-of-inputs", "Errors, InvalidInput")
def _number_of_inputs(c: Function) -> None:
    """A wrong number of input vectors gets status 400 and the error InvalidInput."""
    c.require("Evaluate")
    _check_error(c.post("Evaluate", input=[*c.point, [1.0]]), "InvalidInput")


@_add("input-length", "Errors, InvalidInput")
def _input_length(c: Function) -> None:
    """An input vector of a wrong length gets status 400 and the error InvalidInput."""
    c.require("Evaluate")
    _check_error(c.post("Evaluate", input=[[*c.point[0], 1.0], *c.point[1:]]), "InvalidInput")


@_add("input-type", "POST /Evaluate", level="should")
def _input_type(c: Function) -> None:
    """Elements that are not numbers get status 400 and the error InvalidInput."""
    c.require("Evaluate")
    _check_error(c.post("Evaluate", input=[["text"] * len(c.point[0]), *c.point[1:]]), "InvalidInput")


def _invalid(name: str, feature: str, requirement: str, field_name: str, level: Any = "must") -> None:
    """Add a clause: a derivative request with an index or a vector out of range is rejected."""

    def check(c: Function) -> None:
        c.require(feature)
        wrong: Any = 99
        if field_name in ("sens", "vec"):
            wrong = [1.0] * (c.sizes("output" if field_name == "sens" else "input")[0] + 1)
        _check_error(c.derivative(feature, **{field_name: wrong}), "InvalidInput")

    check.__doc__ = requirement
    _add(name, f"POST /{feature}; Errors, InvalidInput", level)(check)


for _feature, _fields in {
    "Gradient": ("inWrt", "outWrt", "sens"),
    "ApplyJacobian": ("inWrt", "outWrt", "vec"),
    "ApplyHessian": ("inWrt1", "inWrt2", "outWrt", "sens", "vec"),
}.items():
    for _field in _fields:
        _kind = "of a wrong length" if _field in ("sens", "vec") else "out of range"
        _invalid(
            f"{_feature.lower()}-{_field.lower()}",
            _feature,
            f"{_feature} with '{_field}' {_kind} gets status 400 and the error InvalidInput.",
            _field,
        )

PROTOCOL = Protocol("umbridge", "UM-Bridge", "UM-Bridge protocol, version 1.0", _prepare, CLAUSES)
