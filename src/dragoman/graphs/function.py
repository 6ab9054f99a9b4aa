"""A graph of functions as one function of vectors, with derivatives by the chain rule."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.vectors import ABILITIES, Ability, Config, Vector, VectorFunction, Vectors
from dragoman.graphs import plan
from dragoman.graphs.plan import SENS, Plan, Step, Terms
from dragoman.graphs.results import derivative_vector, node_error, output_vectors
from dragoman.graphs.run import Order, take
from dragoman.graphs.sizes import Sizes, infer
from dragoman.graphs.wiring import Bound, GraphInput, Node, Port, Source, Wiring
from dragoman.system.threads import DaemonThreads

_CONFIGS = 64  # for so many configs sizes are kept
# How many calls of a graph are under way at a time, unless somebody says otherwise.
CONCURRENCY = 16


class GraphFunction(VectorFunction):
    """The function that a graph computes.

    Each call asks every node that is needed to evaluate once, and no other. Nodes that are independent of each other
    are asked at the same time, by at most `threads` threads (0: one after another). What the graph can do follows from
    what its nodes can: `gradient`, for one, needs a gradient of every node that lies between an input and an output.
    A call for one input and output works where the nodes between them can do it.

    Raises InvalidInput, when made, where sizes do not fit. An error of a node keeps its kind and gets its name.
    """

    def __init__(self, wiring: Wiring, *, name: str = "", threads: int = 8) -> None:
        self.wiring = wiring
        self.name = name
        self.input_names = wiring.input_names
        self.output_names = wiring.output_names
        self._sizes = lru_cache(_CONFIGS)(self._inferred)
        self._plan = lru_cache(None)(self._planned)
        self._lacking = lru_cache(None)(lambda ability: self._missing(plan.everything(wiring, ability)))
        self.sizes({})
        self._abilities = {n: frozenset(node.function.sources()) for n, node in wiring.nodes.items()}
        self._evaluation = self._plan("evaluate")
        nodes = [wiring.nodes[step.node] for step in self._evaluation[0].steps]
        self.vectorised = bool(wiring.input_names) and all(node.function.vectorised for node in nodes)
        self.concurrency = 1 if all(node.cheap for node in wiring.nodes.values()) else CONCURRENCY
        self._pool = DaemonThreads(threads, "graph") if threads else None

    def sizes(self, config: Config) -> Sizes:
        """The sizes of the whole and of each node under a config. Raises InvalidInput where they do not fit."""
        return self._sizes(_key(config))

    def input_sizes(self, config: Config) -> Sequence[int]:
        return self.sizes(config).inputs

    def output_sizes(self, config: Config) -> Sequence[int]:
        return self.sizes(config).outputs

    def evaluate(self, inputs: Vectors, config: Config) -> list[Vector]:
        rows = next((len(x) for x in inputs if np.ndim(x) == 2), None)
        point = self._point(inputs, config, rows)
        plan, order = self._evaluation
        results = take(order, partial(point.step, plan, (None, None)), self._pool)
        found = [results[plan.evaluations[p.node]][p.index] for p in self.wiring.outputs]
        return found if rows is None else [np.broadcast_to(y, (rows, y.shape[-1])) for y in found]

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Vector:  # noqa: A002
        asked = self._plan("gradient", output, input)
        return self._derivative(asked, inputs, (sens, None), config, self.sizes(config).inputs[input])

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Vector:  # noqa: A002
        asked = self._plan("apply_jacobian", output, input)
        return self._derivative(asked, inputs, (None, vec), config, self.sizes(config).outputs[output])

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Vector:
        asked = self._plan("apply_hessian", output, input1, input2)
        return self._derivative(asked, inputs, (sens, vec), config, self.sizes(config).inputs[input1])

    def sources(self) -> Mapping[Ability, str]:
        return {ability: "graph" for ability in ABILITIES if self.lacking(ability) is None}

    def lacking(self, ability: Ability) -> Step | None:
        """The first question that the graph would have to ask for this, of all inputs and outputs, and cannot."""
        return self._lacking(ability)

    def notes(self) -> Mapping[str, Any]:
        """The nodes, what each can do and where that comes from, and what keeps the whole from doing more."""
        nodes = {name: {**node.function.sources(), **node.function.notes()} for name, node in self.wiring.nodes.items()}
        lacking = {ability: self.lacking(ability) for ability in ABILITIES}
        missing = {name: f"'{s.node}' has no {s.ability}" for name, s in lacking.items() if s is not None}
        return {"graph": {"nodes": nodes, **({"missing": missing} if missing else {})}}

    def unavailable(self) -> str:
        """Why the first node that cannot answer cannot, with its name."""
        found = ((name, node.function.unavailable()) for name, node in self.wiring.nodes.items())
        return next((f"node '{name}': {reason}" for name, reason in found if reason), "")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for function in {id(n.function): n.function for n in self.wiring.nodes.values()}.values():
            function.close()

    # ------------------------------------------------------------------------------------------------------

    def _inferred(self, key: str) -> Sizes:
        return infer(self.wiring, json.loads(key))

    def _missing(self, asked: Plan) -> Step | None:
        return next((s for s in asked.steps if s.ability not in self._abilities[s.node]), None)

    def _planned(self, ability: Ability, *place: int) -> tuple[Plan, Order]:
        asked = _PLANS[ability](self.wiring, *place)
        missing = self._missing(asked)
        if missing is not None:
            raise NotSupported(f"{ability}: node '{missing.node}' does not support {missing.ability}")
        return asked, Order(asked, [self.wiring.nodes[s.node].cheap for s in asked.steps])

    def _point(self, inputs: Vectors, config: Config, rows: int | None) -> "_Point":
        return _Point(self.wiring, self.sizes(config), inputs, config, rows)

    def _derivative(
        self,
        asked: tuple[Plan, Order],
        inputs: Vectors,
        seeds: tuple[Vector | None, Vector | None],
        config: Config,
        size: int,
    ) -> Vector:
        plan, order = asked
        point = self._point(inputs, config, None)
        results = take(order, partial(point.step, plan, seeds), self._pool)
        found = _sum(plan.answer, seeds, results)
        return np.zeros(size) if found is None else found


_PLANS: Mapping[Ability, Callable[..., Plan]] = {
    "evaluate": plan.evaluation,
    "gradient": plan.gradient,
    "apply_jacobian": plan.apply_jacobian,
    "apply_hessian": plan.apply_hessian,
}


class _Point:
    """Where a graph is evaluated or differentiated: its inputs, and what follows from them."""

    def __init__(self, wiring: Wiring, sizes: Sizes, inputs: Vectors, config: Config, rows: int | None) -> None:
        self._wiring = wiring
        self._sizes = sizes
        self._inputs = inputs
        self._config = config
        self._rows = rows

    def step(self, plan: Plan, seeds: tuple[Vector | None, Vector | None], step: Step, results: Sequence[Any]) -> Any:
        """The result of one step: all outputs of an evaluation, or a vector; None where that is zero anyway."""
        node = self._wiring.nodes[step.node]
        if step.ability == "evaluate":
            return self._evaluated(plan, step, results)
        found = self._differentiated(plan, step, seeds, results)
        if found is None:
            return None
        forward = step.ability == "apply_jacobian"
        sizes = self._sizes.node_outputs if forward else self._sizes.node_inputs
        size = sizes[step.node][step.output if forward else step.input1]
        return self._for(node, derivative_vector, found, size, step.ability)

    def _evaluated(self, plan: Plan, step: Step, results: Sequence[Any]) -> tuple[Vector, ...]:
        node = self._wiring.nodes[step.node]
        inputs = [self._value(s, plan, results) for s in self._wiring.sources[step.node]]
        rows = self._rows if any(x.ndim == 2 for x in inputs) else None
        if rows is not None:
            inputs = [np.broadcast_to(x, (rows, x.shape[-1])) for x in inputs]
        sizes = self._sizes.node_outputs[step.node]
        found = self._ask(node, node.function.evaluate, inputs)
        given: tuple[Vector, ...] = self._for(node, output_vectors, found, sizes, rows)
        return given

    def _differentiated(
        self,
        plan: Plan,
        step: Step,
        seeds: tuple[Vector | None, Vector | None],
        results: Sequence[Any],
    ) -> Any:
        node = self._wiring.nodes[step.node]
        sens, vec = _sum(step.sens, seeds, results), _sum(step.vec, seeds, results)
        if (step.sens and sens is None) or (step.vec and vec is None):
            return None
        if node.affine:  # wherever one asks
            inputs: Sequence[Vector] = [_zeros(n) for n in self._sizes.node_inputs[step.node]]
        else:
            inputs = [self._value(s, plan, results) for s in self._wiring.sources[step.node]]
        function = node.function
        match step.ability:
            case "gradient":
                return self._ask(node, function.gradient, step.output, step.input1, inputs, sens)
            case "apply_jacobian":
                return self._ask(node, function.apply_jacobian, step.output, step.input1, inputs, vec)
            case _:
                places = (step.output, step.input1, step.input2)
                return self._ask(node, function.apply_hessian, *places, inputs, sens, vec)

    def _ask(self, node: Node, method: Callable[..., Any], *arguments: Any) -> Any:
        return self._for(node, method, *arguments, node.configured(self._config))

    @staticmethod
    def _for(node: Node, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function gives; its errors get the name of the node."""
        try:
            return function(*arguments)
        except Exception as fault:
            raise node_error(fault, node.name) from fault

    def _value(self, source: Source, plan: Plan, results: Sequence[Any]) -> Vector:
        match source:
            case Port():
                found: Vector = results[plan.evaluations[source.node]][source.index]
                return found
            case GraphInput():
                return self._inputs[source.index]
            case Bound():
                return source.value


def _sum(terms: Terms, seeds: tuple[Vector | None, Vector | None], results: Sequence[Any]) -> Vector | None:
    """The terms, added up in the plan's order; None where that is zero: nobody need be asked then."""
    total: Vector | None = None
    for term in terms:
        value = results[term] if term >= 0 else seeds[term != SENS]
        if value is not None:
            total = value if total is None else total + value
    if total is None or not total.any():
        return None
    if total.flags.writeable:
        total = total.view()
        total.flags.writeable = False
    return total


@lru_cache(256)
def _zeros(size: int) -> Vector:
    found = np.zeros(size)
    found.flags.writeable = False
    return found


def _key(config: Config) -> str:
    """A config as text that is the same for equal ones."""
    if not config:
        return "{}"
    try:
        return json.dumps(config, sort_keys=True)
    except (TypeError, ValueError) as fault:
        raise InvalidInput(f"config: expected JSON values, got {fault}") from fault
