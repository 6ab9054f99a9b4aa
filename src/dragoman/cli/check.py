"""`dragoman check derivatives MODEL`: whether what a model says of its derivatives is true."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.cli.served import Served
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.core.vectors import Config, Vector
from dragoman.derivatives.checks import Finding, Tolerance, check
from dragoman.derivatives.plot import Curve, as_svg, as_text
from dragoman.server import make_engine, settings_for
from dragoman.settings import from_environment

# How far random points are from the middle, in units of --spread, in turn; and how many are tried for each.
_SPREADS = (1.0, 5.0, 0.2, 2.0, 3.0)
_TRIES = 20

_EPILOG = """\
what is checked, for every output by every input at every point, along random directions v, u and weights s:
  apply_jacobian  each element of J v, relative to itself, against central differences of the output: the smallest error
                  of ten steps, and the order at which errors fall (2 where all is well; "exact" where there is nothing
                  to fall)
  gradient        each element of Jᵀ s, relative to itself, and <v, Jᵀ s> against central differences of <s, output>
  adjoint         <J v, s> = <v, Jᵀ s>
  apply_hessian   against central differences of the gradient
  symmetry        <u, H v> = <v, H u>

examples:
  dragoman check derivatives model.py:energy
  dragoman check derivatives examples/scientific --model beam --at '[[10, 10, ...]]' --plot beam.svg
  dragoman check derivatives http://127.0.0.1:4242 --model forward --config '{"level": 2}'

The exit status is 0 where all is well, 1 where something is wrong, and 2 where nothing could be checked.
"""


def add_to(commands: Any) -> None:
    """Add the subcommand to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser("check", help="check what a model says of itself")
    kinds = parser.add_subparsers(title="what to check", metavar="WHAT", required=True)
    derivatives: argparse.ArgumentParser = kinds.add_parser(
        "derivatives",
        help="gradients, Jacobian and Hessian actions, against differences and each other",
        description="Check gradients, Jacobian and Hessian actions against differences and each other.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = derivatives.add_argument
    add("path", metavar="MODEL", help="as for dragoman serve, or the address of a UM-Bridge server")
    add("--model", default="", metavar="NAME", help="the one of several models (default all)")
    add("--config", default="{}", metavar="JSON", help="the config of every call")
    add("--at", action="append", metavar="JSON", help="a point, one list for each input; may be given several times")
    add("--points", type=int, default=5, metavar="N", help="how many random points, where none is given (default 5)")
    add(
        "--spread",
        type=float,
        default=0.5,
        metavar="X",
        help="how far they are from the model's own point, as logarithms of factors, or from zero: 1/5 to 5 times X",
    )
    add("--seed", type=int, default=0, metavar="N", help="the seed of points and directions (default 0)")
    add("--tolerance", type=float, default=1e-6, metavar="X", help="largest error against differences (default 1e-6)")
    add("--identity", type=float, default=1e-9, metavar="X", help="largest error of identities (default 1e-9)")
    add("--plot", metavar="FILE", help="draw the errors by step: to an SVG file, or to the terminal with -")
    derivatives.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
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
            checked = [_checked(Served(engine, name, runner, config), config, given) for name in models]
        finally:
            runner.run(engine.close())
    return max(checked)


def _checked(served: Served, config: Config, given: argparse.Namespace) -> int:
    """Check one model and tell what was found: 0, 1, or 2 where it has no derivatives."""
    told = ", ".join(f"{ability} by {source}" for ability, source in served.sources().items() if ability != "evaluate")
    print(f"\n{served.name}: {told or 'no derivatives'}")
    if not told:
        return 2
    differenced = any("finite differences" in source for source in served.sources().values())
    identities = max(given.identity, 1e-5) if differenced else given.identity
    points = list(_points(served, config, given))
    if not points:
        print("  the function has no finite values at any random point; name points of its domain with --at")
        return 2
    found = check(served, points, config, given.seed, Tolerance(given.tolerance, identities))
    print(_table(served, found))
    bad = sum(not finding.passed for finding in found)
    print(
        f"\n{'all is well' if not bad else f'{bad} of {len(found)} checks failed'}, at {_counted(len(points), 'point')}"
    )
    if given.plot:
        _plot(served, found, given.plot)
    return 1 if bad else 0


# --- where ------------------------------------------------------------------------------------------------


def _points(served: Served, config: Config, given: argparse.Namespace) -> Iterator[Sequence[Vector]]:
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


def _is_inside(served: Served, point: Sequence[Vector], config: Config) -> bool:
    """Whether the function has finite values at a point. Raises what it raises there for another reason."""
    try:
        return all(np.isfinite(y).all() for y in served.evaluate(point, config))
    except (ModelFailed, InvalidOutput):
        return False


def _point(text: str, sizes: Sequence[int]) -> list[Vector]:
    try:
        found = [np.array(each, np.float64).reshape(-1) for each in _json(text, list, "--at")]
    except (TypeError, ValueError) as fault:
        raise InvalidInput(f"--at: expected one list of numbers for each input, got {text}: {fault}") from fault
    if [len(each) for each in found] != list(sizes):
        raise InvalidInput(f"--at: expected vectors of {list(sizes)} numbers, got {[len(each) for each in found]}")
    return found


def _json(text: str, kind: type, what: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError as fault:
        raise InvalidInput(f"{what}: expected JSON, got {text}: {fault}") from fault
    if not isinstance(found, kind):
        raise InvalidInput(f"{what}: expected {'an object' if kind is dict else 'a list'}, got {text}")
    return found


def _remote(url: str, model: str) -> ModelSpec:
    if not model:
        raise InvalidInput(f"which model of '{url}'? Name it: --model NAME")
    return ModelSpec(name=model, runtime="umbridge", uri=url, parameters={"model": model, "urls": url})


# --- what is told -----------------------------------------------------------------------------------------


def _table(served: Served, found: Sequence[Finding]) -> str:
    rows = [("check", "output", "by", "error", "order", "")]
    rows += [(f.check, *_where(served, f), *_measured(f), _verdict(f)) for f in found]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, [*widths, 0], strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _where(served: Served, finding: Finding) -> tuple[str, str]:
    return served.output_names[finding.output], ", ".join(served.input_names[i] for i in finding.inputs)


def _measured(finding: Finding) -> tuple[str, str]:
    if finding.refused:
        return "-", "-"
    if not finding.curve:
        return f"{finding.error:.1e}", "-"
    return f"{finding.error:.1e}", "exact" if finding.order is None else f"{finding.order:.2f}"


def _verdict(finding: Finding) -> str:
    if finding.refused:
        return f"REFUSED: {finding.refused}"
    return "ok" if finding.passed else f"WRONG: {finding.why}" if finding.why else "WRONG"


def _plot(served: Served, found: Sequence[Finding], place: str) -> None:
    curves = [Curve(f"{f.check} {' by '.join(_where(served, f))}", f.curve) for f in found if f.curve]
    if place == "-":
        print("\n" + as_text(curves))
        return
    path = Path(place)
    try:
        path.write_text(as_svg(curves, f"{served.name}: errors of central differences"), encoding="utf-8")
    except OSError as fault:
        raise InvalidInput(f"'{place}' cannot be written: {fault}") from fault


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
