"""What must be asked of which node to answer one call of a graph, by the chain rule; nothing is computed here.

With F_k the function of node k, x_k its inputs, y_k its outputs, and for the graph's output `out` and its inputs `in`:

- tangents t: t(in) = vec, t(y_k[o]) = sum_i J_k[o, i] t(x_k[i]); the answer of ApplyJacobian is t(out);
- adjoints a: a(out) = sens, a(x_k[i]) = sum_o J_k[o, i]ᵀ a(y_k[o]), summed over all that a value feeds; the answer of
  Gradient is a(in);
- second-order adjoints b: b(x_k[i]) = sum_o (J_k[o, i]ᵀ b(y_k[o]) + sum_j d²(a(y_k[o]) · F_k[o])/dx_i dx_j t(x_k[j])),
  with t from in2; the answer of ApplyHessian is b(in1).

(Source: the chain rule; forward over reverse.)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dragoman.core.vectors import Ability
from dragoman.graphs.wiring import GraphInput, Port, Wiring

# In a sum of terms: the caller's sens or vec. Any other term is the result of the step of that number.
SENS, VEC = -1, -2

Terms = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One question to one node. `sens` and `vec` are sums of terms; `after` are the steps that it waits for."""

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
    """Steps in an order in which they can be taken, and the terms that add up to the answer.

    `evaluations`: which step evaluates a node.
    """

    steps: tuple[Step, ...]
    evaluations: Mapping[str, int]
    answer: Terms = ()


def evaluation(wiring: Wiring) -> Plan:
    """All outputs of the graph; nodes that lead to none are left out."""
    return _Planner(wiring).evaluating({p.node for p in wiring.outputs}).plan()


def gradient(wiring: Wiring, output: int, input: int) -> Plan:  # noqa: A002
    return _gradient(_Route(wiring, [output], [input]))


def apply_jacobian(wiring: Wiring, output: int, input: int) -> Plan:  # noqa: A002
    return _apply_jacobian(_Route(wiring, [output], [input]))


def apply_hessian(wiring: Wiring, output: int, input1: int, input2: int) -> Plan:
    return _apply_hessian(_Route(wiring, [output], [input1]), _Route(wiring, [output], [input2]))


def everything(wiring: Wiring, ability: Ability) -> Plan:
    """A plan that asks each node for all that any plan of this ability asks it; what it adds up to means nothing."""
    route = _Route(wiring, range(len(wiring.outputs)), range(len(wiring.input_names)))
    match ability:
        case "evaluate":
            return evaluation(wiring)
        case "gradient":
            return _gradient(route)
        case "apply_jacobian":
            return _apply_jacobian(route)
        case _:
            return _apply_hessian(route, route)


def _gradient(route: "_Route") -> Plan:
    planner = _Planner(route.wiring)
    adjoints = planner.adjoints(route, {*route.nodes})
    return planner.plan(_collected(adjoints, route))


def _apply_jacobian(route: "_Route") -> Plan:
    planner = _Planner(route.wiring)
    tangents = planner.tangents(route, {*route.nodes}, None)
    return planner.plan(tuple(term for port in route.outs for term in tangents.get(port, ())))


def _apply_hessian(route: "_Route", forward: "_Route") -> Plan:
    wiring = route.wiring
    planner = _Planner(wiring)
    curved = {n for n in route.nodes if not wiring.nodes[n].affine and forward.active(n)}
    tangents = planner.tangents(forward, _before(wiring, forward, curved), curved)
    adjoints = planner.adjoints(route, _after(wiring, route, curved), inner=True)
    seconds = planner.seconds(route, forward, curved, adjoints, tangents)
    return planner.plan(_collected(seconds, route))


class _Route:
    """What of a graph lies between some of its inputs, commonly one, and some of its outputs."""

    def __init__(self, wiring: Wiring, outputs: Iterable[int], inputs: Iterable[int]) -> None:
        self.wiring = wiring
        self.inputs = [GraphInput(i) for i in inputs]
        self.outs = [wiring.outputs[o] for o in outputs]
        self._dependent: set[str] = set()
        self._active: dict[str, list[int]] = {}
        for name, sources in wiring.sources.items():
            active = [
                i
                for i, s in enumerate(sources)
                if s in self.inputs or (isinstance(s, Port) and s.node in self._dependent)
            ]
            if active:
                self._active[name] = active
                self._dependent.add(name)
        self._live: dict[str, list[int]] = {}
        for name in reversed(wiring.nodes):
            live = [o for o in range(wiring.output_counts[name]) if self._leads(Port(name, o))]
            if live:
                self._live[name] = live
        self.nodes = [n for n in wiring.nodes if n in self._dependent and n in self._live]

    def _leads(self, port: Port) -> bool:
        return port in self.outs or any(end.node in self._live for end in self.wiring.consumers.get(port, ()))

    def active(self, name: str) -> list[int]:
        """The node's inputs that depend on the graph's input."""
        return self._active.get(name, [])

    def live(self, name: str) -> list[int]:
        """The node's outputs on which the graph's output depends."""
        return self._live.get(name, [])

    def fed(self, port: Port) -> Iterable[Port]:
        """The inputs that an output feeds, of nodes on the route."""
        return (end for end in self.wiring.consumers.get(port, ()) if end.node in self._live)


def _before(wiring: Wiring, route: _Route, targets: set[str]) -> set[str]:
    """The nodes on which one of the targets depends, among those that depend on the route's input."""
    found: set[str] = set()
    for name in reversed(wiring.nodes):
        ports = [Port(name, o) for o in range(wiring.output_counts[name])]
        ends = {end.node for port in ports for end in wiring.consumers.get(port, ())}
        if route.active(name) and ends & (targets | found):
            found.add(name)
    return found


def _after(wiring: Wiring, route: _Route, origins: set[str]) -> set[str]:
    """The origins, and the nodes on the route that depend on one of them."""
    found = set(origins)
    for name in route.nodes:
        if any(isinstance(s, Port) and s.node in found for s in wiring.sources[name]):
            found.add(name)
    return found


def _collected(adjoints: Mapping[Port, list[int]], route: _Route) -> Terms:
    """The adjoint of the graph's input: what all the node inputs that it feeds give."""
    ends = (end for source in route.inputs for end in route.wiring.fed_by(source.index))
    return tuple(term for end in ends for term in adjoints.get(end, ()))


class _Planner:
    """Steps so far. Derivatives are numbered from 0 here; the evaluations come before them in the end."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.steps: list[Step] = []
        self.wanted: set[str] = set()  # nodes to evaluate

    def _add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def tangents(self, route: _Route, nodes: set[str], targets: set[str] | None) -> dict[Port, Terms]:
        """The forward sweep through `nodes`, up to what feeds the targets, or up to the route's end: the terms of the
        tangent of each output."""
        ends = nodes | (targets or set())
        found: dict[Port, Terms] = {}
        for name in self.wiring.nodes:
            if name not in nodes:
                continue
            for o in range(self.wiring.output_counts[name]):
                port = Port(name, o)
                fed = {end.node for end in self.wiring.consumers.get(port, ())}
                if not fed & ends and (targets is not None or port not in route.outs):
                    continue
                found[port] = tuple(
                    self._add(Step(name, "apply_jacobian", o, i, vec=self._tangent(name, i, found)))
                    for i in route.active(name)
                )
        return found

    def _tangent(self, name: str, i: int, tangents: Mapping[Port, Terms]) -> Terms:
        source = self.wiring.sources[name][i]
        return tangents[source] if isinstance(source, Port) else (VEC,)

    def adjoints(self, route: _Route, nodes: set[str], *, inner: bool = False) -> dict[Port, list[int]]:
        """The reverse sweep through `nodes`: the terms of the adjoint of each input, those that `inner` nodes feed only
        or also those that the graph's input feeds."""
        found: dict[Port, list[int]] = {}
        for name in reversed(route.nodes):
            if name not in nodes:
                continue
            for i in route.active(name):
                source = self.wiring.sources[name][i]
                if inner and not (isinstance(source, Port) and source.node in nodes):
                    continue
                found[Port(name, i)] = [
                    self._add(Step(name, "gradient", o, i, sens=self._adjoint(Port(name, o), route, found)))
                    for o in route.live(name)
                ]
        return found

    @staticmethod
    def _adjoint(port: Port, route: _Route, adjoints: Mapping[Port, list[int]], *, seed: bool = True) -> Terms:
        terms = [SENS] if seed and port in route.outs else []
        return (*terms, *(term for end in route.fed(port) for term in adjoints.get(end, ())))

    def seconds(
        self,
        route: _Route,
        forward: _Route,
        curved: set[str],
        adjoints: Mapping[Port, list[int]],
        tangents: Mapping[Port, Terms],
    ) -> dict[Port, list[int]]:
        """The second-order reverse sweep: the terms of b of each input."""
        found: dict[Port, list[int]] = {}
        for name in reversed(route.nodes):
            for i in route.active(name):
                terms = found[Port(name, i)] = []
                for o in route.live(name):
                    b = self._adjoint(Port(name, o), route, found, seed=False)
                    if b:
                        terms.append(self._add(Step(name, "gradient", o, i, sens=b)))
                    for j in forward.active(name) if name in curved else ():
                        a = self._adjoint(Port(name, o), route, adjoints)
                        t = self._tangent(name, j, tangents)
                        terms.append(self._add(Step(name, "apply_hessian", o, i, j, sens=a, vec=t)))
        return found

    def evaluating(self, names: Iterable[str]) -> "_Planner":
        """Evaluate these nodes, and all that they need."""
        self.wanted |= {*names}
        return self

    def plan(self, answer: Terms = ()) -> Plan:
        """All steps, with the evaluations of what they need at the front."""
        for step in self.steps:
            if not self.wiring.nodes[step.node].affine:  # its derivatives are the same everywhere
                self.wanted |= _needed(self.wiring, step.node)
        for name in reversed(self.wiring.nodes):
            if name in self.wanted:
                self.wanted |= _needed(self.wiring, name)
        order = [name for name in self.wiring.nodes if name in self.wanted]
        position = {name: i for i, name in enumerate(order)}
        by = len(order)

        def shifted(terms: Terms) -> Terms:
            return tuple(t + by if t >= 0 else t for t in terms)

        steps = [Step(n, "evaluate", after=tuple(sorted(position[m] for m in _needed(self.wiring, n)))) for n in order]
        for s in self.steps:
            sens, vec = shifted(s.sens), shifted(s.vec)
            point = () if self.wiring.nodes[s.node].affine else (position[m] for m in _needed(self.wiring, s.node))
            after = tuple(sorted({*point, *(t for t in (*sens, *vec) if t >= 0)}))
            steps.append(Step(s.node, s.ability, s.output, s.input1, s.input2, sens, vec, after))
        return Plan(tuple(steps), position, shifted(answer))


def _needed(wiring: Wiring, name: str) -> set[str]:
    """The nodes that feed one."""
    return {s.node for s in wiring.sources[name] if isinstance(s, Port)}
