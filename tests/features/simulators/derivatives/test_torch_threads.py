"""PyTorch in many threads of one process: derivatives of functions and graphs, and models that load."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dragoman import open_engine
from dragoman.core.vectors import VectorFunction
from dragoman_simulators.graphs.graph import Graph
from features.simulators.derivatives.derivative_models import build, vector_function

CLIENTS, CALLS = 16, 240


def first(x: Any) -> Any:
    return torch.stack([torch.exp(-x[0]) * torch.sin(x[1]) * x[2], (x**3).sum()])


def second(x: Any) -> Any:
    return torch.stack([torch.tanh(x[0] * x[1]) + x[2] ** 2, x[0] / (1 + x[1] ** 2)])


def graph() -> VectorFunction:
    """Four nodes of PyTorch run concurrently, in the threads of the graph, for each of many calls."""
    g = Graph("torch")
    x = g.input("x", 3)
    nodes = [
        g.add(vector_function(inputs=[3], outputs=[2], verify="never")(function), f"n{i}")(x)
        for i, function in enumerate((first, second, first, second))
    ]
    g.output(g.sum(*nodes))
    return g.build()


def derivatives(function: VectorFunction, point: int) -> list[np.ndarray]:
    rng = np.random.default_rng(point)
    x, sens, vec = rng.uniform(0.2, 1, 3), rng.normal(size=2), rng.normal(size=3)
    return [
        np.asarray(function.gradient(0, 0, [x], sens, {})),
        np.asarray(function.apply_jacobian(0, 0, [x], vec, {})),
        np.asarray(function.apply_hessian(0, 0, 0, [x], sens, vec, {})),
    ]


def test_many_threads_get_the_derivatives_of_one() -> None:
    functions = [build(each, inputs=[3], verify="never") for each in (first, second)]
    functions.append(graph())
    calls = [(functions[i % 3], i % 7) for i in range(CALLS)]
    expected = {(i, point): derivatives(functions[i], point) for i in range(3) for point in range(7)}
    with ThreadPoolExecutor(CLIENTS) as pool:
        results = list(pool.map(lambda call: derivatives(*call), calls))
    for number, result in enumerate(results):
        for actual, right in zip(result, expected[number % 3, number % 7], strict=True):
            np.testing.assert_allclose(actual, right, rtol=1e-12, atol=1e-14)
    for each in functions:
        each.close()


@pytest.mark.parametrize("kind", ["apply_jacobian", "apply_hessian"])
def test_two_calls_that_are_in_the_function_at_the_same_time(kind: str) -> None:
    """Each waits for the other in the middle of the function, where forward mode would mix their tangents."""
    both = threading.Barrier(2, timeout=60)

    def waiting(x: Any) -> Any:
        y = torch.sin(x)
        both.wait()
        return y * x

    function = build(waiting, inputs=[1], outputs=[1], verify="never", evaluate_at_load=False, derivatives="torch")

    def call(number: float) -> Any:
        x, vec = np.array([number]), np.array([10 * number])
        if kind == "apply_jacobian":
            return np.asarray(function.apply_jacobian(0, 0, [x], vec, {}))
        return np.asarray(function.apply_hessian(0, 0, 0, [x], np.ones(1), vec, {}))

    with ThreadPoolExecutor(2) as pool:
        for result, x in zip(pool.map(call, (0.5, 2.0)), (0.5, 2.0), strict=True):
            slope = np.cos(x) * x + np.sin(x) if kind == "apply_jacobian" else 2 * np.cos(x) - x * np.sin(x)
            assert result == pytest.approx([slope * 10 * x])


def test_derivatives_in_threads_are_confirmed_too() -> None:
    function = build(second, inputs=[3])
    with ThreadPoolExecutor(CLIENTS) as pool:
        for result, point in zip(pool.map(lambda i: derivatives(function, i % 5), range(40)), range(40), strict=True):
            np.testing.assert_allclose(np.concatenate(result), np.concatenate(derivatives(function, point % 5)))


class Cubes(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor([factor], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * (x**3).sum(-1, keepdim=True)


async def test_several_exported_programs_load_in_one_server(tmp_path: Path) -> None:
    """torch.export.load has one deserializer for the process."""
    files = [tmp_path / f"m{i}.pt2" for i in range(5)]
    for i, file in enumerate(files):
        program = torch.export.export(Cubes(i + 1.0).eval(), (torch.ones(3, dtype=torch.float64),))
        torch.export.save(program, file)
    async with open_engine(*files, allow_pickle=True, placement="thread") as engine:
        for i in range(5):
            outputs = await engine.infer(f"m{i}", {"x": np.ones(3)})
            assert [each.tolist() for each in outputs.values()] == [[3.0 * (i + 1)]]
