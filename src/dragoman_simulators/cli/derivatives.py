"""Check of a model's derivatives, as a table."""

import argparse
import asyncio
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from dragoman.cli.input_values import parse_json
from dragoman.client.client import Client
from dragoman.core import calls
from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput, ModelFailed, NotSupported
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import NONE, Tensor
from dragoman.core.vectors import Ability, Config, Vector, VectorFunction, Vectors
from dragoman.engine.engine import Engine
from dragoman.engine_setup import make_engine, settings_for
from dragoman.settings import from_environment
from dragoman_simulators.derivatives.checks import CheckResult, Tolerance, run_checks

A = TypeVar("A")

_ABILITIES: Mapping[type[calls.Call[Any]], Ability] = {
    calls.Infer: "evaluate",
    calls.Gradient: "gradient",
    calls.ApplyJacobian: "apply_jacobian",
    calls.ApplyHessian: "apply_hessian",
}


_NAMES_TIMEOUT_S = 5.0
PROGRESS_S = 5.0  # between two lines of progress


class Progress:
    """A context that prints its stage and the number of calls to the standard error every few seconds."""

    def __init__(self) -> None:
        self.stage, self.calls = "loading", 0
        self._began_s = time.monotonic()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._print, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_done.set()
        self._thread.join()

    def staged(self, points: Sequence[Vectors], name: str) -> Iterator[Vectors]:
        """Yield the points, each as a stage of the checks of a model."""
        for i, point in enumerate(points, 1):
            self.stage = f"{name}: checks at point {i} of {len(points)}"
            yield point

    def _print(self) -> None:
        while not self._is_done.wait(PROGRESS_S):
            elapsed_s = time.monotonic() - self._began_s
            print(f"{self.stage}, {_pluralize(self.calls, 'call')}, {elapsed_s:.0f} s", file=sys.stderr, flush=True)


class ServedFunction(VectorFunction):
    """A model whose methods send calls to the engine in the event loop of `runner`.

    named: another signature of the model, whose names are used if it has as many inputs and outputs.
    """

    def __init__(
        self, engine: Engine, name: str, runner: asyncio.Runner, config: Config, progress: Progress, named: Signature
    ) -> None:
        self.name, self._engine, self._runner, self.progress = name, engine, runner, progress
        self._description: calls.ModelDescription = self._call(calls.Describe())
        signature = self._signature(config)
        if [len(named.inputs), len(named.outputs)] == [len(signature.inputs), len(signature.outputs)]:
            signature = named
        self.input_names = tuple(spec.name for spec in signature.inputs)
        self.output_names = tuple(spec.name for spec in signature.outputs)

    def input_sizes(self, config: Config) -> Sequence[int]:
        return [_size(spec) for spec in self._signature(config).inputs]

    def output_sizes(self, config: Config) -> Sequence[int]:
        return [_size(spec) for spec in self._signature(config).outputs]

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        result = self._call(calls.Infer({}, positional=_tensors(inputs), config=config or NONE))
        return tuple(tensor.data.reshape(-1) for tensor in result.outputs.values())

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        where: Any = {"output": output, "input": input, "sens": Tensor.of(sens)}
        return self._derivative(calls.Gradient, inputs, config, where)

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        where: Any = {"output": output, "input": input, "vec": Tensor.of(vec)}
        return self._derivative(calls.ApplyJacobian, inputs, config, where)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        where: Any = {"output": output, "input1": input1, "input2": input2}
        where |= {"sens": Tensor.of(sens), "vec": Tensor.of(vec)}
        return self._derivative(calls.ApplyHessian, inputs, config, where)

    def sources(self) -> Mapping[Ability, str]:
        known = self._description.details.get("derivatives", {})
        return {
            name: known.get(name, "the model") for kind, name in _ABILITIES.items() if kind in self._description.calls
        }

    def why_none(self) -> str:
        """Say that there are no derivatives, and the reasons if they are known."""
        reasons = dict.fromkeys(self._description.details.get("missing_derivatives", {}).values())
        return "; ".join(["no derivatives", *reasons])

    def point(self, sizes: Sequence[int]) -> list[Vector]:
        """Return the default point of the model if it has these sizes, otherwise zeros."""
        point = [np.array(each, np.float64) for each in self._description.details.get("point", [])]
        return point if [len(each) for each in point] == list(sizes) else [np.zeros(size) for size in sizes]

    def _signature(self, config: Config) -> Signature:
        return self._call(calls.SignatureFor(config or NONE))

    def _derivative(
        self, kind: type[calls.DerivativeCall], inputs: Vectors, config: Config, where: Mapping[str, Any]
    ) -> Any:
        result = self._call(kind(positional=_tensors(inputs), config=config or NONE, **where))
        return result.data.reshape(-1)

    def _call(self, call: calls.Call[A]) -> A:
        result = self._runner.run(self._engine.call(calls.Request(call, self.name))).answer
        self.progress.calls += 1
        return result


def _tensors(inputs: Vectors) -> tuple[Tensor, ...]:
    return tuple(map(Tensor.of, inputs))


def _size(spec: TensorSpec) -> int:
    if not spec.shape or spec.shape[-1] < 0:
        raise NotSupported(f"'{spec.name}' is not a vector of known size")
    return spec.shape[-1]


# For derivatives by finite differences, whose own estimate of their error may be up to this.
_APPROXIMATE = Tolerance(1e-2, 1e-2)
# How far random points are from the middle, in units of --spread, in turn; and how many are tried for each.
_SPREADS = (1.0, 5.0, 0.2, 2.0, 3.0)
_TRIES = 20


def check_derivatives(arguments: argparse.Namespace) -> int:
    """Check the models that the arguments of the command name; return its exit status."""
    config = parse_json(arguments.config, dict, "--config")
    if ":" in arguments.path and not arguments.path.rpartition(":")[0].endswith(".py"):
        sys.path.append(os.getcwd())  # as `dragoman serve` finds modules
    with Progress() as progress, asyncio.Runner() as runner:
        folders = [arguments.path] if Path(arguments.path).is_dir() else []
        settings = settings_for(folders, from_environment(os.environ), {"placement": "thread"})
        remote = arguments.path.startswith(("http://", "https://"))
        objects = [_remote(arguments.path, arguments.model)] if remote else []
        engine = make_engine([] if remote else [arguments.path], objects, settings)
        runner.run(engine.start())
        try:
            models = [d.spec.name for d in engine.deployments() if arguments.model in ("", d.spec.name)]
            if not models:
                raise InvalidInput(f"unknown model '{arguments.model}' in '{arguments.path}'")
            named = _remote_signature(arguments.path, arguments.model) if remote else Signature()
            functions = (ServedFunction(engine, name, runner, config, progress, named) for name in models)
            results = [_check_model(function, config, arguments) for function in functions]
        finally:
            runner.run(engine.close())
    if arguments.json:
        print(json.dumps([result for _, result in results], indent=2))
    return max(status for status, _ in results)


def _check_model(
    function: ServedFunction, config: Config, arguments: argparse.Namespace
) -> tuple[int, Mapping[str, object]]:
    """Check one model; print the results unless `--json` is set.

    Return 0, 1, or 2 if nothing could be checked, and the results as JSON values.
    """
    show = print if not arguments.json else lambda _text: None
    methods = {ability: source for ability, source in function.sources().items() if ability != "evaluate"}
    result = {"model": function.name, "methods": methods, "points": 0, "checks": []}
    named = ", ".join(f"{ability} by {source}" for ability, source in methods.items())
    show(f"\n{function.name}: {named or function.why_none()}")
    if not methods:
        return 2, result
    is_approximate = any("finite differences" in source for source in methods.values())
    tolerance = _tolerance(arguments, _APPROXIMATE if is_approximate else Tolerance())
    function.progress.stage = f"{function.name}: finding points"
    points = list(_points(function, config, arguments))
    if not points:
        show("  the function has no finite values at any random point; name points of its domain with --at")
        return 2, result
    checks = run_checks(function, function.progress.staged(points, function.name), config, arguments.seed, tolerance)
    show(_table(function, checks))
    bad = sum(not check.passed for check in checks)
    verdict = f"{bad} of {len(checks)} checks failed" if bad else "all checks passed"
    show(f"\n{verdict}, at {_pluralize(len(points), 'point')}")
    if tolerance.is_approximate:
        limit = f"{tolerance.differences:g}"
        show(f"errors up to {limit} pass, as the derivatives are approximate; --tolerance X changes this")
    elif bad and all(check.passed or check.error <= _APPROXIMATE.differences for check in checks):
        hint = f"--tolerance {_APPROXIMATE.differences:g} --identity {_APPROXIMATE.identities:g}"
        show(f"every error is small: if the model is noisy, or approximates its derivatives, use {hint}")
    return int(bad > 0), result | {"points": len(points), "checks": [_as_json(function, check) for check in checks]}


def _tolerance(arguments: argparse.Namespace, default: Tolerance) -> Tolerance:
    differences, identities = arguments.tolerance, arguments.identity
    return Tolerance(
        default.differences if differences is None else differences,
        default.identities if identities is None else identities,
    )


def _as_json(function: ServedFunction, check: CheckResult) -> Mapping[str, object]:
    return {
        "check": check.check,
        "output": function.output_names[check.output],
        "inputs": [function.input_names[i] for i in check.inputs],
        "error": check.error if math.isfinite(check.error) else None,
        "order": check.order,
        "passed": check.passed,
        "reason": check.rejection or check.reason,
        "curve": [{"step": step, "error": error} for step, error in check.curve],
    }


# --- points -----------------------------------------------------------------------------------------------


def _points(function: ServedFunction, config: Config, arguments: argparse.Namespace) -> Iterator[Sequence[Vector]]:
    sizes = function.input_sizes(config)
    if arguments.at:
        yield from (_point(text, sizes) for text in arguments.at)
        return
    middle = function.point(sizes)
    rng = np.random.default_rng(arguments.seed)
    remaining, count = _TRIES * arguments.points, 0
    while remaining and count < arguments.points:
        spread = arguments.spread * _SPREADS[count % len(_SPREADS)]
        point = [_near(x, spread, rng) for x in middle]
        remaining -= 1
        if _is_inside(function, point, config):
            count += 1
            yield point


def _near(x: Vector, spread: float, rng: np.random.Generator) -> Vector:
    """Return a random point near x. Numbers keep their signs, as a model may accept only one; zeros get any."""
    moves = spread * rng.normal(size=len(x))
    return np.asarray(np.where(x != 0, x * np.exp(np.clip(moves, -1.5, 1.5)), moves))


def _is_inside(function: ServedFunction, point: Sequence[Vector], config: Config) -> bool:
    """Return whether the function has finite values at a point."""
    try:
        return all(np.isfinite(y).all() for y in function.evaluate(point, config))
    except (ModelFailed, InvalidOutput):
        return False


def _point(text: str, sizes: Sequence[int]) -> list[Vector]:
    try:
        point = [np.array(each, np.float64).reshape(-1) for each in parse_json(text, list, "--at")]
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"--at: expected one list of numbers for each input, got {text}: {error}") from error
    if [len(each) for each in point] != list(sizes):
        raise InvalidInput(f"--at: expected vectors of {list(sizes)} numbers, got {[len(each) for each in point]}")
    return point


def _remote(url: str, model: str) -> ModelSpec:
    return ModelSpec(name=model or "model", runtime="umbridge", uri=url, parameters={"model": model, "urls": url})


def _remote_signature(url: str, model: str) -> Signature:
    """Return the signature of a model over Open Inference, as UM-Bridge has no names; an empty one if there is none."""
    with suppress(DragomanError), Client(url, timeout_s=_NAMES_TIMEOUT_S, retries=0) as client:
        names = [model] if model else client.models()
        if len(names) == 1:
            return client.metadata(names[0]).signature
    return Signature()


# --- output -----------------------------------------------------------------------------------------------


def _table(function: ServedFunction, found: Sequence[CheckResult]) -> str:
    rows = [("check", "output", "by", "error", "order", "")]
    rows += [(f.check, *_where(function, f), *_format_error(f), _verdict(f)) for f in found]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, [*widths, 0], strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _where(function: ServedFunction, result: CheckResult) -> tuple[str, str]:
    return function.output_names[result.output], ", ".join(function.input_names[i] for i in result.inputs)


def _format_error(result: CheckResult) -> tuple[str, str]:
    if result.rejection:
        return "-", "-"
    if not result.curve:
        return f"{result.error:.1e}", "-"
    return f"{result.error:.1e}", "exact" if result.order is None else f"{result.order:.2f}"


def _verdict(result: CheckResult) -> str:
    if result.rejection:
        return f"REFUSED: {result.rejection}"
    return "ok" if result.passed else f"WRONG: {result.reason}" if result.reason else "WRONG"


def _pluralize(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
