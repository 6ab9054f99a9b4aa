"""Plan the calls of nodes that answer one call of a graph, by the chain rule; nothing is computed here.

With F_k the function of node k, x_k its inputs, y_k its outputs, and for the graph's output `out` and its inputs `in`:

- tangents t: t(in) = vec, t(y_k[o]) = sum_i J_k[o, i] t(x_k[i]); the result of ApplyJacobian is t(out);
- adjoints a: a(out) = sens, a(x_k[i]) = sum_o J_k[o, i]ᵀ a(y_k[o]), summed over all consumers of a value; the result of
  Gradient is a(in);
- second-order adjoints b: b(x_k[i]) = sum_o (J_k[o, i]ᵀ b(y_k[o]) + sum_j d²(a(y_k[o]) · F_k[o])/dx_i dx_j t(x_k[j])),
  with t from in2; the result of ApplyHessian is b(in1).

(Source: the chain rule; forward over reverse.)
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dragoman.core.vectors import Ability
from dragoman_simulators.graphs.wiring import GraphInput, Port, Wiring

# Terms of a sum: the caller's sens or vec; any other term is the number of the step whose result it is.
SENS, VEC = -1, -2

Terms = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One call of one node. `sens` and `vec` are sums of terms; `after` are the steps that it waits for."""

    node: str
    ability: Ability
    output: int = 0
    input1: int = 0
    input2: int = 0
    sens: Terms = ()
    vec: Terms = ()
    after: Terms = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in a valid order. `evaluations` maps a node to the step that evaluates it; `result` is a sum of terms."""

    steps: tuple[Step, ...]
    evaluations: Mapping[str, int]
    result: Terms = ()


def plan_evaluation(wiring: Wiring) -> Plan:
    """Evaluate all outputs of the graph, and only the nodes that they need."""
    planner = _Planner(wiring)
    planner.evaluated = {port.node for port in wiring.outputs}
    return planner.plan()


def plan_gradient(wiring: Wiring, output: int, input: int) -> Plan:  # noqa: A002
    return _plan_gradient(_Subgraph(wiring, [output], [input]))


def plan_jacobian(wiring: Wiring, output: int, input: int) -> Plan:  # noqa: A002
    return _plan_jacobian(_Subgraph(wiring, [output], [input]))


def plan_hessian(wiring: Wiring, output: int, input1: int, input2: int) -> Plan:
    return _plan_hessian(_Subgraph(wiring, [output], [input1]), _Subgraph(wiring, [output], [input2]))


PLANNERS: Mapping[Ability, Callable[..., Plan]] = {
    "evaluate": plan_evaluation,
    "gradient": plan_gradient,
    "apply_jacobian": plan_jacobian,
    "apply_hessian": plan_hessian,
}


def plan_all(wiring: Wiring, ability: Ability) -> Plan:
    """Contain every step of every plan for an ability. The result is meaningless."""
    subgraph = _Subgraph(wiring, range(len(wiring.outputs)), range(len(wiring.input_names)))
    match ability:
        case "evaluate":
            return plan_evaluation(wiring)
        case "gradient":
            return _plan_gradient(subgraph)
        case "apply_jacobian":
            return _plan_jacobian(subgraph)
        case _:
            return _plan_hessian(subgraph, subgraph)


def _plan_gradient(subgraph: "_Subgraph") -> Plan:
    planner = _Planner(subgraph.wiring)
    adjoints = planner.add_adjoints(subgraph, {*subgraph.nodes})
    return planner.plan(_input_terms(adjoints, subgraph))


def _plan_jacobian(subgraph: "_Subgraph") -> Plan:
    planner = _Planner(subgraph.wiring)
    tangents = planner.add_tangents(subgraph, {*subgraph.nodes}, None)
    return planner.plan(tuple(term for port in subgraph.outputs for term in tangents.get(port, ())))


def _plan_hessian(subgraph: "_Subgraph", forward: "_Subgraph") -> Plan:
    wiring = subgraph.wiring
    planner = _Planner(wiring)
    curved = {n for n in subgraph.nodes if not wiring.nodes[n].affine and forward.active_inputs(n)}
    tangents = planner.add_tangents(forward, _ancestors(wiring, forward, curved), curved)
    adjoints = planner.add_adjoints(subgraph, _descendants(wiring, subgraph, curved), inner=True)
    second_order = planner.add_second_order(subgraph, forward, curved, adjoints, tangents)
    return planner.plan(_input_terms(second_order, subgraph))


class _Subgraph:
    """The nodes between some inputs and some outputs of a graph; usually one of each."""

    def __init__(self, wiring: Wiring, outputs: Iterable[int], inputs: Iterable[int]) -> None:
        self.wiring = wiring
        self.inputs = [GraphInput(i) for i in inputs]
        self.outputs = [wiring.outputs[o] for o in outputs]
        self._active: dict[str, list[int]] = {}
        for name, sources in wiring.sources.items():
            active = [
                i for i, s in enumerate(sources) if s in self.inputs or (isinstance(s, Port) and s.node in self._active)
            ]
            if active:
                self._active[name] = active
        self._live: dict[str, list[int]] = {}
        for name in reversed(wiring.nodes):
            live = [o for o in range(wiring.output_counts[name]) if self._is_live(Port(name, o))]
            if live:
                self._live[name] = live
        self.nodes = [n for n in wiring.nodes if n in self._active and n in self._live]

    def _is_live(self, port: Port) -> bool:
        return port in self.outputs or any(end.node in self._live for end in self.wiring.consumers.get(port, ()))

    def active_inputs(self, name: str) -> list[int]:
        """Return the inputs of a node that depend on the inputs of the graph."""
        return self._active.get(name, [])

    def live_outputs(self, name: str) -> list[int]:
        """Return the outputs of a node on which the outputs of the graph depend."""
        return self._live.get(name, [])

    def consumers(self, port: Port) -> Iterable[Port]:
        """Return the inputs that an output feeds, of nodes of this subgraph."""
        return (end for end in self.wiring.consumers.get(port, ()) if end.node in self._live)


def _ancestors(wiring: Wiring, subgraph: _Subgraph, targets: set[str]) -> set[str]:
    """Return the nodes on which a target depends and that depend on the inputs of the subgraph."""
    ancestors: set[str] = set()
    for name in reversed(wiring.nodes):
        ports = [Port(name, o) for o in range(wiring.output_counts[name])]
        ends = {end.node for port in ports for end in wiring.consumers.get(port, ())}
        if subgraph.active_inputs(name) and ends & (targets | ancestors):
            ancestors.add(name)
    return ancestors


def _descendants(wiring: Wiring, subgraph: _Subgraph, origins: set[str]) -> set[str]:
    """Return the origins and the nodes of the subgraph that depend on one of them."""
    descendants = set(origins)
    for name in subgraph.nodes:
        if any(isinstance(s, Port) and s.node in descendants for s in wiring.sources[name]):
            descendants.add(name)
    return descendants


def _input_terms(adjoints: Mapping[Port, list[int]], subgraph: _Subgraph) -> Terms:
    """Return the adjoint of the graph's input: the sum over all node inputs that it feeds."""
    ends = (end for source in subgraph.inputs for end in subgraph.wiring.input_consumers(source.index))
    return tuple(term for end in ends for term in adjoints.get(end, ()))


class _Planner:
    """The steps so far. Derivatives are numbered from 0 here; `plan` puts the evaluations before them."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.steps: list[Step] = []
        self.evaluated: set[str] = set()

    def _add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def add_tangents(self, subgraph: _Subgraph, nodes: set[str], targets: set[str] | None) -> dict[Port, Terms]:
        """Add the forward sweep through `nodes`, to the inputs of the targets or, without targets, to the outputs.

        Return the terms of the tangent of each output.
        """
        ends = nodes | (targets or set())
        tangents: dict[Port, Terms] = {}
        for name in self.wiring.nodes:
            if name not in nodes:
                continue
            for o in range(self.wiring.output_counts[name]):
                port = Port(name, o)
                consumers = {end.node for end in self.wiring.consumers.get(port, ())}
                if not consumers & ends and (targets is not None or port not in subgraph.outputs):
                    continue
                tangents[port] = tuple(
                    self._add(Step(name, "apply_jacobian", o, i, vec=self._tangent(name, i, tangents)))
                    for i in subgraph.active_inputs(name)
                )
        return tangents

    def _tangent(self, name: str, i: int, tangents: Mapping[Port, Terms]) -> Terms:
        source = self.wiring.sources[name][i]
        return tangents[source] if isinstance(source, Port) else (VEC,)

    def add_adjoints(self, subgraph: _Subgraph, nodes: set[str], *, inner: bool = False) -> dict[Port, list[int]]:
        """Add the reverse sweep through `nodes`.

        Return the terms of the adjoint of each active input; with `inner`, only of those that `nodes` feed.
        """
        adjoints: dict[Port, list[int]] = {}
        for name in reversed(subgraph.nodes):
            if name not in nodes:
                continue
            for i in subgraph.active_inputs(name):
                source = self.wiring.sources[name][i]
                if inner and not (isinstance(source, Port) and source.node in nodes):
                    continue
                adjoints[Port(name, i)] = [
                    self._add(Step(name, "gradient", o, i, sens=self._adjoint(Port(name, o), subgraph, adjoints)))
                    for o in subgraph.live_outputs(name)
                ]
        return adjoints

    @staticmethod
    def _adjoint(
        port: Port, subgraph: _Subgraph, adjoints: Mapping[Port, list[int]], *, with_sens: bool = True
    ) -> Terms:
        terms = [SENS] if with_sens and port in subgraph.outputs else []
        return (*terms, *(term for end in subgraph.consumers(port) for term in adjoints.get(end, ())))

    def add_second_order(
        self,
        subgraph: _Subgraph,
        forward: _Subgraph,
        curved: set[str],
        adjoints: Mapping[Port, list[int]],
        tangents: Mapping[Port, Terms],
    ) -> dict[Port, list[int]]:
        """Add the second-order reverse sweep; return the terms of b of each input."""
        second_order: dict[Port, list[int]] = {}
        for name in reversed(subgraph.nodes):
            for i in subgraph.active_inputs(name):
                terms = second_order[Port(name, i)] = []
                for o in subgraph.live_outputs(name):
                    b = self._adjoint(Port(name, o), subgraph, second_order, with_sens=False)
                    if b:
                        terms.append(self._add(Step(name, "gradient", o, i, sens=b)))
                    for j in forward.active_inputs(name) if name in curved else ():
                        a = self._adjoint(Port(name, o), subgraph, adjoints)
                        t = self._tangent(name, j, tangents)
                        terms.append(self._add(Step(name, "apply_hessian", o, i, j, sens=a, vec=t)))
        return second_order

    def plan(self, result: Terms = ()) -> Plan:
        """Return all steps, after the evaluations that they need."""
        for step in self.steps:
            if not self.wiring.nodes[step.node].affine:  # its derivatives are the same everywhere
                self.evaluated |= self._predecessors(step.node)
        for name in reversed(self.wiring.nodes):
            if name in self.evaluated:
                self.evaluated |= self._predecessors(name)
        order = [name for name in self.wiring.nodes if name in self.evaluated]
        position = {name: i for i, name in enumerate(order)}

        def renumber(terms: Terms) -> Terms:
            return tuple(t + len(order) if t >= 0 else t for t in terms)

        steps = [Step(n, "evaluate", after=tuple(sorted(position[m] for m in self._predecessors(n)))) for n in order]
        for s in self.steps:
            sens, vec = renumber(s.sens), renumber(s.vec)
            affine = self.wiring.nodes[s.node].affine
            point = () if affine else (position[name] for name in self._predecessors(s.node))
            after = tuple(sorted({*point, *(t for t in (*sens, *vec) if t >= 0)}))
            steps.append(Step(s.node, s.ability, s.output, s.input1, s.input2, sens, vec, after))
        return Plan(tuple(steps), position, renumber(result))

    def _predecessors(self, name: str) -> set[str]:
        return {s.node for s in self.wiring.sources[name] if isinstance(s, Port)}
