"""A graph of functions as one function of vectors, with derivatives by the chain rule."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from dragoman.core.documents import parse_json
from dragoman.core.errors import (
    DragomanError,
    InvalidInput,
    InvalidOutput,
    ModelFailed,
    NotSupported,
    error_text,
)
from dragoman.core.vectors import (
    ABILITIES,
    Ability,
    Config,
    Vector,
    VectorFunction,
    Vectors,
    as_matrices,
    as_vector,
    as_vectors,
)
from dragoman.system.threads import DaemonThreads
from dragoman_simulators.graphs.plan import PLANNERS, SENS, Plan, Step, Terms, plan_all
from dragoman_simulators.graphs.run import Schedule, run_steps
from dragoman_simulators.graphs.sizes import Sizes, infer_sizes
from dragoman_simulators.graphs.wiring import BoundValue, GraphInput, Port, Source, Wiring

log = logging.getLogger("dragoman.model")

_CACHED_CONFIGS = 64  # configs whose sizes are cached
# Default number of concurrent calls of a graph.
CONCURRENCY = 16

Seeds = tuple[Vector | None, Vector | None]  # sens and vec of a call


class GraphFunction(VectorFunction):
    """The function that a graph computes.

    A call evaluates each node that it needs once, and no other. Independent nodes run concurrently, in at most
    `threads` threads (0: one after another). An ability of the graph needs that ability of every node between its
    inputs and outputs; a call for one input and output needs it only of the nodes between these.

    The constructor raises InvalidInput if sizes do not match. An error of a node keeps its type and names the node.
    """

    def __init__(self, wiring: Wiring, *, name: str = "", threads: int = 8) -> None:
        self.wiring = wiring
        self.name = name
        self.input_names = wiring.input_names
        self.output_names = wiring.output_names
        self._sizes = lru_cache(_CACHED_CONFIGS)(lambda key: infer_sizes(wiring, parse_json(key)))
        self._plan = lru_cache(None)(self._make_plan)
        self.sizes({})
        self._abilities = {n: frozenset(node.function.sources()) for n, node in wiring.nodes.items()}
        self._missing = {ability: self._missing_step(plan_all(wiring, ability)) for ability in ABILITIES}
        self._evaluation = self._plan("evaluate")
        nodes = [wiring.nodes[step.node] for step in self._evaluation[0].steps]
        self.vectorised = bool(wiring.input_names) and all(node.function.vectorised for node in nodes)
        self.concurrency = 1 if all(node.cheap for node in wiring.nodes.values()) else CONCURRENCY
        self._pool = DaemonThreads(threads, "graph") if threads else None

    def sizes(self, config: Config) -> Sizes:
        """Return the sizes of the graph and of each node. Raises InvalidInput if they do not match."""
        return self._sizes(_cache_key(config))

    def input_sizes(self, config: Config) -> Sequence[int]:
        return self.sizes(config).inputs

    def output_sizes(self, config: Config) -> Sequence[int]:
        return self.sizes(config).outputs

    def evaluate(self, inputs: Vectors, config: Config) -> list[Vector]:
        rows = next((len(x) for x in inputs if np.ndim(x) == 2), None)
        plan, schedule = self._evaluation
        point = _Point(self.wiring, self.sizes(config), inputs, config, rows)
        results = run_steps(schedule, partial(point.run_step, plan, (None, None)), self._pool)
        outputs = [results[plan.evaluations[p.node]][p.index] for p in self.wiring.outputs]
        return outputs if rows is None else [np.broadcast_to(y, (rows, y.shape[-1])) for y in outputs]

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Vector:  # noqa: A002
        plan = self._plan("gradient", output, input)
        return self._derivative(plan, inputs, (sens, None), config, self.sizes(config).inputs[input])

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Vector:  # noqa: A002
        plan = self._plan("apply_jacobian", output, input)
        return self._derivative(plan, inputs, (None, vec), config, self.sizes(config).outputs[output])

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Vector:
        plan = self._plan("apply_hessian", output, input1, input2)
        return self._derivative(plan, inputs, (sens, vec), config, self.sizes(config).inputs[input1])

    def sources(self) -> Mapping[Ability, str]:
        return {ability: "graph" for ability in ABILITIES if self._missing[ability] is None}

    def missing(self) -> Mapping[Ability, str]:
        return {ability: self._missing_text(step) for ability, step in self._missing.items() if step is not None}

    def accepts(self, name: str) -> bool:
        return any(node.accepts(name) for node in self.wiring.nodes.values())

    def missing_step(self, ability: Ability) -> Step | None:
        """Return the first step that an ability needs, over all inputs and outputs, and that its node cannot do."""
        return self._missing[ability]

    def notes(self) -> Mapping[str, Any]:
        """Return the abilities of each node and their sources, the edges, and what prevents abilities of the graph."""
        nodes = {name: {**node.function.sources(), **node.function.notes()} for name, node in self.wiring.nodes.items()}
        missing = {name: f"'{s.node}' has no {s.ability}" for name, s in self._missing.items() if s is not None}
        graph: dict[str, Any] = {"nodes": nodes, "edges": [*self._edges()]}
        return {"graph": {**graph, **({"missing": missing} if missing else {})}}

    def unavailable(self) -> str:
        reasons = ((name, node.function.unavailable()) for name, node in self.wiring.nodes.items())
        return next((f"node '{name}': {reason}" for name, reason in reasons if reason), "")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for function in {id(n.function): n.function for n in self.wiring.nodes.values()}.values():
            function.close()

    def _edges(self) -> Iterator[Mapping[str, Any]]:
        """Yield what feeds each input of a node, then the outputs, with the sizes of the vectors."""
        wiring, sizes = self.wiring, self.sizes({})
        for name, sources in wiring.sources.items():
            for i, source in enumerate(sources):
                end = {"node": name, "port": str(i)}
                yield {"from": _origin(source, wiring), "to": end, "size": sizes.node_inputs[name][i]}
        for name, port, size in zip(wiring.output_names, wiring.outputs, sizes.outputs, strict=True):
            yield {"from": _origin(port, wiring), "to": {"output": name}, "size": size}

    def _missing_step(self, plan: Plan) -> Step | None:
        return next((s for s in plan.steps if s.ability not in self._abilities[s.node]), None)

    def _missing_text(self, step: Step) -> str:
        reason = self.wiring.nodes[step.node].function.missing().get(step.ability)
        return f"node '{step.node}' does not support {step.ability}{f': {reason}' if reason else ''}"

    def _make_plan(self, ability: Ability, *ports: int) -> tuple[Plan, Schedule]:
        plan = PLANNERS[ability](self.wiring, *ports)
        missing = self._missing_step(plan)
        if missing is not None:
            raise NotSupported(f"{ability}: {self._missing_text(missing)}")
        return plan, Schedule(plan, [self.wiring.nodes[s.node].cheap for s in plan.steps])

    def _derivative(
        self, planned: tuple[Plan, Schedule], inputs: Vectors, seeds: Seeds, config: Config, size: int
    ) -> Vector:
        plan, schedule = planned
        point = _Point(self.wiring, self.sizes(config), inputs, config, None)
        results = run_steps(schedule, partial(point.run_step, plan, seeds), self._pool)
        result = _sum_terms(plan.result, seeds, results)
        return np.zeros(size) if result is None else result


class _Point:
    """The inputs at which a graph is evaluated or differentiated. `rows`: their number of points, None for one."""

    def __init__(self, wiring: Wiring, sizes: Sizes, inputs: Vectors, config: Config, rows: int | None) -> None:
        self._wiring = wiring
        self._sizes = sizes
        self._inputs = inputs
        self._config = config
        self._rows = rows

    def run_step(self, plan: Plan, seeds: Seeds, step: Step, results: Sequence[Any]) -> Any:
        """Return all outputs of an evaluation, or a derivative; None if that is zero. Raises errors that name the
        node."""
        try:
            if step.ability == "evaluate":
                return self._evaluate(plan, step, results)
            return self._differentiate(plan, step, seeds, results)
        except DragomanError as error:
            if isinstance(error, InvalidInput):
                self._check_values(plan, step, results, error)
            raise type(error)(f"node '{step.node}': {error.message}") from error
        except BaseException as error:
            log.error("node '%s' failed", step.node, exc_info=error)
            text = f"node '{step.node}' failed: {type(error).__name__}: {error_text(error)}"
            raise ModelFailed(text[:1000]) from error

    def _check_values(self, plan: Plan, step: Step, results: Sequence[Any], error: InvalidInput) -> None:
        """Raise InvalidOutput if another node's value that is not finite is the cause of an error."""
        for source in self._wiring.sources[step.node]:
            if isinstance(source, Port) and not np.isfinite(value := self._value(source, plan, results)).all():
                wrong = value[~np.isfinite(value)][0]
                raise InvalidOutput(
                    f"node '{source.node}', output {source.index}: expected finite numbers, got {wrong}, which node "
                    f"'{step.node}' rejects"
                ) from error

    def _evaluate(self, plan: Plan, step: Step, results: Sequence[Any]) -> tuple[Vector, ...]:
        node = self._wiring.nodes[step.node]
        inputs = self._node_inputs(plan, step, results)
        rows = self._rows if any(x.ndim == 2 for x in inputs) else None
        if rows is not None:
            inputs = [np.broadcast_to(x, (rows, x.shape[-1])) for x in inputs]
        sizes = self._sizes.node_outputs[step.node]
        result = node.function.evaluate(inputs, node.merge_config(self._config))
        return tuple(map(_read_only, as_vectors(result, sizes) if rows is None else as_matrices(result, rows, sizes)))

    def _differentiate(self, plan: Plan, step: Step, seeds: Seeds, results: Sequence[Any]) -> Vector | None:
        node = self._wiring.nodes[step.node]
        sens, vec = _sum_terms(step.sens, seeds, results), _sum_terms(step.vec, seeds, results)
        if (step.sens and sens is None) or (step.vec and vec is None):
            return None
        inputs = self._node_inputs(plan, step, results)
        function, config = node.function, node.merge_config(self._config)
        size = self._sizes.node_inputs[step.node][step.input1]
        if step.ability == "gradient":
            assert sens is not None
            result = function.gradient(step.output, step.input1, inputs, sens, config)
        elif step.ability == "apply_jacobian":
            assert vec is not None
            result = function.apply_jacobian(step.output, step.input1, inputs, vec, config)
            size = self._sizes.node_outputs[step.node][step.output]
        else:
            assert sens is not None
            assert vec is not None
            result = function.apply_hessian(step.output, step.input1, step.input2, inputs, sens, vec, config)
        return _read_only(as_vector(result, size, step.ability))

    def _node_inputs(self, plan: Plan, step: Step, results: Sequence[Any]) -> list[Vector]:
        node = self._wiring.nodes[step.node]
        if node.affine and step.ability != "evaluate":  # its derivatives are the same everywhere
            return [_zeros(size) for size in self._sizes.node_inputs[step.node]]
        return [self._value(source, plan, results) for source in self._wiring.sources[step.node]]

    def _value(self, source: Source, plan: Plan, results: Sequence[Any]) -> Vector:
        match source:
            case Port():
                value: Vector = results[plan.evaluations[source.node]][source.index]
                return value
            case GraphInput():
                return self._inputs[source.index]
            case BoundValue():
                return source.value


def _sum_terms(terms: Terms, seeds: Seeds, results: Sequence[Any]) -> Vector | None:
    """Return the sum of the terms, in the order of the plan; None if it is zero, so that no node need be called."""
    total: Vector | None = None
    for term in terms:
        value = results[term] if term >= 0 else seeds[term != SENS]
        if value is not None:
            total = value if total is None else total + value
    return None if total is None or not total.any() else _read_only(total)


def _read_only(array: Vector) -> Vector:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


@lru_cache(256)
def _zeros(size: int) -> Vector:
    return _read_only(np.zeros(size))


def _cache_key(config: Config) -> str:
    """Return JSON that is the same for equal configs."""
    if not config:
        return "{}"
    try:
        return json.dumps(config, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"config: expected JSON values, got {error}") from error


def _origin(source: Source, wiring: Wiring) -> Mapping[str, str]:
    """Return what an edge starts from: a node, an input of the graph, or a constant."""
    match source:
        case Port():
            return {"node": source.node, "port": str(source.index)}
        case GraphInput():
            return {"input": wiring.input_names[source.index]}
        case _:
            shown = ", ".join(f"{value:g}" for value in source.value[:3])
            return {"constant": shown + (", ..." if len(source.value) > 3 else "")}
