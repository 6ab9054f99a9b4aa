"""Check of a model's derivatives, as a table."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.cli.model_functions import ServedFunction
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.core.vectors import Config, Vector
from dragoman.derivatives.checks import CheckResult, Tolerance, run_checks
from dragoman.derivatives.plot import ErrorCurve, svg_plot, text_plot
from dragoman.server import make_engine, settings_for
from dragoman.settings import from_environment

# How far random points are from the middle, in units of --spread, in turn; and how many are tried for each.
_SPREADS = (1.0, 5.0, 0.2, 2.0, 3.0)
_TRIES = 20


def check_derivatives(given: argparse.Namespace) -> int:
    """Check the models that the arguments of the command name; return its exit status."""
    config = _json(given.config, dict, "--config")
    if ":" in given.path and not given.path.rpartition(":")[0].endswith(".py"):
        sys.path.append(os.getcwd())  # as `dragoman serve` finds modules
    with asyncio.Runner() as runner:
        folders = [given.path] if Path(given.path).is_dir() else []
        settings = settings_for(folders, from_environment(os.environ), {"placement": "thread"})
        remote = given.path.startswith(("http://", "https://"))
        live = [_remote(given.path, given.model)] if remote else []
        engine = make_engine([] if remote else [given.path], live, settings)
        runner.run(engine.start())
        try:
            models = [d.spec.name for d in engine.deployments() if given.model in ("", d.spec.name)]
            if not models:
                raise InvalidInput(f"there is no model '{given.model}' in '{given.path}'")
            checked = [_checked(ServedFunction(engine, name, runner, config), config, given) for name in models]
        finally:
            runner.run(engine.close())
    return max(checked)


def _checked(served: ServedFunction, config: Config, given: argparse.Namespace) -> int:
    """Check one model and print the results; return 0, 1, or 2 if it has no derivatives."""
    methods = ", ".join(
        f"{ability} by {source}" for ability, source in served.sources().items() if ability != "evaluate"
    )
    print(f"\n{served.name}: {methods or 'no derivatives'}")
    if not methods:
        return 2
    differenced = any("finite differences" in source for source in served.sources().values())
    identities = max(given.identity, 1e-5) if differenced else given.identity
    points = list(_points(served, config, given))
    if not points:
        print("  the function has no finite values at any random point; name points of its domain with --at")
        return 2
    found = run_checks(served, points, config, given.seed, Tolerance(given.tolerance, identities))
    print(_table(served, found))
    bad = sum(not result.passed for result in found)
    print(
        f"\n{'all is well' if not bad else f'{bad} of {len(found)} checks failed'}, at {_counted(len(points), 'point')}"
    )
    if given.plot:
        _plot(served, found, given.plot)
    return 1 if bad else 0


# --- points -----------------------------------------------------------------------------------------------


def _points(served: ServedFunction, config: Config, given: argparse.Namespace) -> Iterator[Sequence[Vector]]:
    sizes = served.input_sizes(config)
    if given.at:
        yield from (_point(text, sizes) for text in given.at)
        return
    middle = served.point(sizes)
    rng = np.random.default_rng(given.seed)
    left, count = _TRIES * given.points, 0
    while left and count < given.points:
        spread = given.spread * _SPREADS[count % len(_SPREADS)]
        point = [_near(x, spread, rng) for x in middle]
        left -= 1
        if _is_inside(served, point, config):
            count += 1
            yield point


def _near(x: Vector, spread: float, rng: np.random.Generator) -> Vector:
    """A random point: numbers keep their signs, which may be all that a model takes; zeros get any."""
    moves = spread * rng.normal(size=len(x))
    return np.asarray(np.where(x != 0, x * np.exp(np.clip(moves, -1.5, 1.5)), moves))


def _is_inside(served: ServedFunction, point: Sequence[Vector], config: Config) -> bool:
    """Whether the function has finite values at a point. Raises what it raises there for another reason."""
    try:
        return all(np.isfinite(y).all() for y in served.evaluate(point, config))
    except (ModelFailed, InvalidOutput):
        return False


def _point(text: str, sizes: Sequence[int]) -> list[Vector]:
    try:
        found = [np.array(each, np.float64).reshape(-1) for each in _json(text, list, "--at")]
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"--at: expected one list of numbers for each input, got {text}: {error}") from error
    if [len(each) for each in found] != list(sizes):
        raise InvalidInput(f"--at: expected vectors of {list(sizes)} numbers, got {[len(each) for each in found]}")
    return found


def _json(text: str, kind: type, what: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"{what}: expected JSON, got {text}: {error}") from error
    if not isinstance(found, kind):
        raise InvalidInput(f"{what}: expected {'an object' if kind is dict else 'a list'}, got {text}")
    return found


def _remote(url: str, model: str) -> ModelSpec:
    if not model:
        raise InvalidInput(f"which model of '{url}'? Name it: --model NAME")
    return ModelSpec(name=model, runtime="umbridge", uri=url, parameters={"model": model, "urls": url})


# --- output -----------------------------------------------------------------------------------------------


def _table(served: ServedFunction, found: Sequence[CheckResult]) -> str:
    rows = [("check", "output", "by", "error", "order", "")]
    rows += [(f.check, *_where(served, f), *_measured(f), _verdict(f)) for f in found]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, [*widths, 0], strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _where(served: ServedFunction, result: CheckResult) -> tuple[str, str]:
    return served.output_names[result.output], ", ".join(served.input_names[i] for i in result.inputs)


def _measured(result: CheckResult) -> tuple[str, str]:
    if result.rejection:
        return "-", "-"
    if not result.curve:
        return f"{result.error:.1e}", "-"
    return f"{result.error:.1e}", "exact" if result.order is None else f"{result.order:.2f}"


def _verdict(result: CheckResult) -> str:
    if result.rejection:
        return f"REFUSED: {result.rejection}"
    return "ok" if result.passed else f"WRONG: {result.reason}" if result.reason else "WRONG"


def _plot(served: ServedFunction, found: Sequence[CheckResult], place: str) -> None:
    curves = [ErrorCurve(f"{f.check} {' by '.join(_where(served, f))}", f.curve) for f in found if f.curve]
    if place == "-":
        print("\n" + text_plot(curves))
        return
    path = Path(place)
    try:
        path.write_text(svg_plot(curves, f"{served.name}: errors of central differences"), encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"'{place}' cannot be written: {error}") from error


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
