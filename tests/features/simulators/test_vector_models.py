"""Functions of vectors as models: both protocols, batches of points, sizes that depend on a config."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import umbridge
from msgspec import structs

import dragoman
from dragoman import (
    ApplyHessian,
    ApplyJacobian,
    Gradient,
    Infer,
    Inference,
    ModelSpec,
    Tensor,
    TensorSpec,
    errors,
    plugins,
)
from dragoman.core.calls import Describe, Request, SignatureFor
from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors
from dragoman.engine.engine import Engine
from dragoman.engine.repository import Repository
from dragoman_simulators.umbridge.routes import support
from features.simulators.conftest import SIMULATORS
from features.simulators.models.simulators import Faulty, Forward, Points, forward
from vector_calls import call_model, vector


async def evaluate(engine: Engine, model: str, *vectors: Sequence[float], **config: Any) -> list[list[float]]:
    call = Infer({}, positional=tuple(vector(*v) for v in vectors), config=config or dragoman.core.tensor.NONE)
    result: Inference = await call_model(engine, model, call)
    return [t.data.reshape(-1).tolist() for t in result.outputs.values()]


async def test_named_tensors_of_a_model_of_the_umbridge_package() -> None:
    async with dragoman.open_engine(forward) as engine:
        description = await call_model(engine, "forward", Describe())
        assert [(s.name, s.shape) for s in description.signature.inputs] == [("input_0", (2,)), ("input_1", (3,))]
        result = await engine.infer("forward", {"input_1": np.ones(3), "input_0": np.array([2.0, 3.0])})
        assert {k: v.tolist() for k, v in result.items()} == {"output_0": [4.0, 9.0], "output_1": [8.0]}
        assert description.details == {
            "derivatives": {"gradient": "author", "apply_jacobian": "author", "apply_hessian": "author"}
        }


@pytest.mark.parametrize("placement", ["inline", "thread", "process"])
async def test_a_config_reaches_the_model_in_every_placement(placement: Any) -> None:
    spec = ModelSpec(name="forward", runtime="python", uri=f"{SIMULATORS}:forward", placement=placement)
    async with Engine(Repository([spec])) as engine:
        assert await evaluate(engine, "forward", [1, 2, 3], [0, 0, 0], n=3, scale=2.0) == [
            [2.0, 8.0, 18.0],
            [6.0],
        ]
        assert await evaluate(engine, "forward", [1, 2], [0, 0, 0]) == [[1.0, 4.0], [3.0]]
        at = (vector(1, 2, 3), vector(0, 0, 0))
        gradient = Gradient(positional=at, output=0, input=0, sens=vector(1, 1, 1), config={"n": 3, "scale": 2.0})
        assert (await call_model(engine, "forward", gradient)).data.tolist() == [4.0, 8.0, 12.0]
        hessian = ApplyHessian(positional=at, sens=vector(1, 2, 3), vec=vector(1, 1, 1), config={"n": 3})
        assert (await call_model(engine, "forward", hessian)).data.tolist() == [2.0, 4.0, 6.0]
        with pytest.raises(errors.InvalidInput, match="expected 2 numbers, got 3"):
            await evaluate(engine, "forward", [1, 2, 3], [0, 0, 0], n=2)
        signature = await call_model(engine, "forward", SignatureFor({"n": 9}))
        assert [s.shape for s in signature.inputs] == [(9,), (3,)]
        named = {"input_0": vector(1, 2, 3), "input_1": vector(0, 0, 0)}  # as other protocols send a config
        result = await call_model(engine, "forward", Infer(named, parameters={"config": '{"n": 3, "scale": 10}'}))
        assert result.outputs["output_0"].data.tolist() == [10.0, 40.0, 90.0]
        with pytest.raises(errors.InvalidInput, match="parameter 'config': expected JSON text of an object"):
            await call_model(engine, "forward", Infer(named, parameters={"config": "[1]"}))
        short = {"input_0": vector(1), "input_1": vector(0, 0, 0)}
        with pytest.raises(errors.InvalidInput, match="expected"):
            await call_model(engine, "forward", Infer(short))


async def test_outputs_are_checked_against_the_sizes_of_the_config() -> None:
    class WrongSizes(VectorFunction):
        def input_sizes(self, config: Config) -> Sequence[int]:
            return (1,)

        def output_sizes(self, config: Config) -> Sequence[int]:
            return (int(config.get("n", 1)),)

        def evaluate(self, inputs: Vectors, config: Config) -> Any:
            return np.zeros(3)

        def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
            return np.zeros(3)

    async with dragoman.open_engine(WrongSizes()) as engine:
        assert await evaluate(engine, "WrongSizes", [1], n=3) == [[0.0, 0.0, 0.0]]
        for config in ({}, {"n": 2}):
            with pytest.raises(errors.InvalidOutput, match=r"output 0: expected [12] numbers, got 3"):
                await evaluate(engine, "WrongSizes", [1], **config)
            call = ApplyJacobian(positional=(vector(1),), vec=vector(1), config=config)
            with pytest.raises(errors.InvalidOutput, match=r"expected [12] numbers, got 3"):
                await call_model(engine, "WrongSizes", call)


async def test_many_points_in_one_call() -> None:
    async with dragoman.open_engine(Points()) as engine:
        description = await call_model(engine, "Points", Describe())
        assert [s.shape for s in description.signature.inputs] == [(-1, 2)]
        points = np.arange(6.0).reshape(3, 2)
        result = await engine.infer("Points", {"x": points})
        np.testing.assert_array_equal(result["square"], (points**2).sum(axis=1, keepdims=True))
        np.testing.assert_array_equal(result["double"], 2 * points)
        assert await evaluate(engine, "Points", [3, 4]) == [[25.0], [6.0, 8.0]]
        call = Gradient(inputs={"x": vector(3, 4)}, output="square", input="x", sens=vector(1))
        assert (await call_model(engine, "Points", call)).data.tolist() == [6.0, 8.0]
        rows = Gradient(inputs={"x": Tensor.of(points[:1])}, output="square", input="x", sens=vector(1))
        assert (await call_model(engine, "Points", rows)).data.tolist() == [0.0, 2.0]


@pytest.mark.parametrize(("placement", "limit"), [("inline", 64), ("thread", 64), ("thread", 0)])
async def test_clients_of_a_vectorised_model_are_merged(placement: Any, limit: int) -> None:
    points = Points()
    spec = ModelSpec(name="p", runtime="python", target=points, placement=placement, max_batch_size=limit)
    async with Engine(Repository([spec])) as engine:
        result = await asyncio.gather(*(evaluate(engine, "p", [float(i), 1.0]) for i in range(64)))
        assert result == [[[i * i + 1.0], [2.0 * i, 2.0]] for i in range(64)]
        assert points.calls <= 8
        if not limit:  # no limit is set for one call
            assert (await engine.infer("p", {"x": np.ones((500, 2))}))["square"].shape == (500, 1)


class Scaled(Points):
    """Points scaled by the config."""

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return tuple(config.get("by", 1) * result for result in super().evaluate(inputs, config))


async def test_only_calls_of_one_config_are_merged() -> None:
    spec = ModelSpec(name="p", runtime="python", target=Scaled(), placement="thread")
    async with Engine(Repository([spec])) as engine:
        expected = [[[by * (i * i + 1.0)], [by * 2.0 * i, by * 2.0]] for i in range(16) for by in (1, 2, 3)]
        result = await asyncio.gather(*(evaluate(engine, "p", [i, 1.0], by=by) for i in range(16) for by in (1, 2, 3)))
        assert result == expected


async def test_streams_use_their_config() -> None:
    spec = ModelSpec(name="d", runtime="python", uri=f"{SIMULATORS}:Double", placement="thread")
    async with Engine(Repository([spec])) as engine:
        call = Infer({"input_0": vector(1, 2)}, parameters={"config": '{"n": 2}'})
        result = [r.answer.outputs["output_0"].data.tolist() async for r in engine.stream(Request(call, "d"))]
        assert result == [[2.0, 4.0]]
        with pytest.raises(errors.InvalidInput, match=r"expected shape \[3\], got \[2\]"):
            async for _ in engine.stream(Request(structs.replace(call, parameters={"config": '{"n": 3}'}), "d")):
                pass


async def test_merging_can_be_disabled() -> None:
    points = Points()
    async with Engine(Repository([ModelSpec(name="p", runtime="python", target=points, max_batch_size=1)])) as engine:
        await asyncio.gather(*(evaluate(engine, "p", [float(i), 1.0]) for i in range(16)))
        assert points.calls == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": "z"}, "output (outWrt): expected one of 'square' of 1, 'double' of 2, got 'z'"),
        ({"input": "y"}, "input (inWrt): expected one of 'x' of 2, got 'y'"),
        ({"inputs": {"y": vector(1, 2)}}, "unexpected input 'y'"),
        ({"inputs": {}}, "expected 1 input vectors"),
        ({"inputs": {"x": Tensor.of([1, 2])}}, "expected datatype FP64, got INT64"),
        ({"inputs": {"x": Tensor.of(np.ones((2, 2)))}}, "expected 2 numbers, got shape [2, 2]"),
        ({"sens": vector(1, 2)}, "sens, for output 'square': expected 1 numbers, got 2"),
    ],
)
async def test_derivative_calls_by_name_are_checked(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"inputs": {"x": vector(1, 2)}, "output": 0, "input": 0, "sens": vector(1), **changes}
    async with dragoman.open_engine(Points()) as engine:
        with pytest.raises(errors.InvalidInput) as error:
            await call_model(engine, "Points", Gradient(**fields))
    assert message in error.value.message


async def test_results_may_be_arrays_lists_and_scalars() -> None:
    async with dragoman.open_engine(Faulty()) as engine:
        assert await evaluate(engine, "Faulty", [0]) == [[1.0, 2.0]]
        assert await evaluate(engine, "Faulty", [8]) == [[1.0, 2.0]]
        with pytest.raises(errors.ModelFailed, match="the mesh is tangled"):
            await evaluate(engine, "Faulty", [10])


class Regressor(dragoman.Model):
    """A model of float vectors that is not a simulator: one row in, one number out."""

    inputs = (TensorSpec("x", dragoman.FP32, (-1, 3)),)
    outputs = (TensorSpec("y", dragoman.FP32, (-1,)), TensorSpec("more", dragoman.INT64, (-1,), optional=True))
    batched = True
    placement = "inline"

    def infer(self, call: Infer) -> Any:
        x = call.inputs["x"].data
        assert x.dtype == np.float32
        return {"y": x.sum(axis=1)}


class NeedsConfig(Forward):
    """Sizes need a config."""

    def get_input_sizes(self, config: dict[str, Any]) -> list[int]:
        return [config["n"], 3]


async def test_sizes_may_need_a_config(caplog: pytest.LogCaptureFixture) -> None:
    async with dragoman.open_engine(NeedsConfig()) as engine:
        assert "has no sizes without a config: KeyError: 'n'" in caplog.text
        assert support(await call_model(engine, "forward", Describe()))["Gradient"]
        assert await evaluate(engine, "forward", [1, 2, 3], [0, 0, 0], n=3) == [[1.0, 4.0, 9.0], [6.0]]
        at = (vector(1, 2, 3), vector(0, 0, 0))
        gradient = Gradient(positional=at, sens=vector(1, 1, 1), config={"n": 3})
        assert (await call_model(engine, "forward", gradient)).data.tolist() == [2.0, 4.0, 6.0]
        for call in (SignatureFor({}), Infer({}, positional=at), Gradient(positional=at, sens=vector(1))):
            with pytest.raises(errors.ModelFailed, match="KeyError: 'n'"):
                await call_model(engine, "forward", call)
        for config in ({"m": 3}, {"n": 1.5}, {"n": -1}, {"n": "x"}):
            with pytest.raises(errors.InvalidInput, match="config: no valid sizes of the vectors"):
                await call_model(engine, "forward", SignatureFor(config))


class Cubic(dragoman.Model):
    """y = x^3, with derivatives of a VectorFunction, one of them `async`; the config gives the length."""

    inputs = (TensorSpec("x", dragoman.FP64, (2,)),)
    outputs = (TensorSpec("y", dragoman.FP64, (2,)),)

    def signature_for(self, call: SignatureFor) -> dragoman.Signature:
        size = (int(call.config.get("n", 2)),)
        return dragoman.Signature((TensorSpec("x", dragoman.FP64, size),), (TensorSpec("y", dragoman.FP64, size),))

    def infer(self, call: Infer) -> Any:
        return (call.inputs["x"].data ** 3)[: call.config.get("returned")]

    def gradient(self, call: Gradient) -> Any:
        assert (call.output, call.input) == ("y", "x")
        return [3 * x * x * s for x, s in zip(call.inputs["x"].data, call.sens.data, strict=True)]

    async def apply_jacobian(self, call: ApplyJacobian) -> Any:
        return 3 * call.inputs["x"].data ** 2 * call.vec.data

    def apply_hessian(self, call: ApplyHessian) -> Any:
        return np.zeros(5)


@pytest.mark.parametrize("placement", ["inline", "thread"])
async def test_a_model_class_with_derivatives(placement: Any) -> None:
    spec = ModelSpec(name="c", runtime="python", target=Cubic, placement=placement)
    async with Engine(Repository([spec])) as engine:
        assert await evaluate(engine, "c", [1, 2]) == [[1.0, 8.0]]
        assert await evaluate(engine, "c", [1, 2, 3], n=3) == [[1.0, 8.0, 27.0]]
        with pytest.raises(errors.InvalidOutput, match=r"output 'y': expected shape \[3\], got \[2\]"):
            await evaluate(engine, "c", [1, 2, 3], n=3, returned=2)
        at: dict[str, Any] = {"positional": (vector(1, 2),)}
        assert (await call_model(engine, "c", Gradient(**at, sens=vector(1, 10)))).data.tolist() == [3.0, 120.0]
        assert (await call_model(engine, "c", ApplyJacobian(**at, vec=vector(1, 1)))).data.tolist() == [3.0, 12.0]
        with pytest.raises(errors.InvalidOutput, match="ApplyHessian: expected 2 numbers, as input 'x' has, got 5"):
            await call_model(engine, "c", ApplyHessian(**at, sens=vector(1, 1), vec=vector(1, 1)))
        five, three = (tuple(range(n)) for n in (5, 3))
        fitting = ApplyHessian(positional=(vector(*five),), sens=vector(*five), vec=vector(*five), config={"n": 5})
        assert (await call_model(engine, "c", fitting)).data.tolist() == [0.0] * 5
        with pytest.raises(errors.InvalidOutput, match="ApplyHessian: expected 3 numbers, as input 'x' has, got 5"):
            await call_model(
                engine,
                "c",
                structs.replace(
                    fitting, positional=(vector(*three),), sens=vector(*three), vec=vector(*three), config={"n": 3}
                ),
            )
        longer = Gradient(positional=(vector(1, 2, 3),), sens=vector(1, 1, 1), config={"n": 3})
        assert (await call_model(engine, "c", longer)).data.tolist() == [3.0, 12.0, 27.0]


async def test_a_regression_of_scikit_learn_evaluates(tmp_path: Path) -> None:
    joblib = pytest.importorskip("joblib")
    linear = pytest.importorskip("sklearn.linear_model")
    x = np.random.default_rng(3).normal(size=(50, 3))
    fitted = linear.LinearRegression().fit(x, x @ [1.0, 2.0, 3.0] + 4)
    joblib.dump(fitted, tmp_path / "plane.joblib")
    async with dragoman.open_engine(str(tmp_path / "plane.joblib"), allow_pickle=True) as engine:
        ((result,),) = await evaluate(engine, "plane", [1, 1, 1])
        assert result == pytest.approx(10.0)
        with pytest.raises(errors.InvalidInput, match=r"input 0 \('input'\): expected 3 numbers, got 2"):
            await evaluate(engine, "plane", [1, 1])


class TextModel(dragoman.Model):
    inputs = (TensorSpec("text", dragoman.BYTES, (-1,)),)
    outputs = (TensorSpec("text", dragoman.BYTES, (-1,)),)

    def infer(self, call: Infer) -> Any:
        return dict(call.inputs)


async def test_any_model_of_float_vectors_is_a_function_of_vectors() -> None:
    async with dragoman.open_engine(Regressor, TextModel) as engine:
        assert await evaluate(engine, "Regressor", [1, 2, 3.5]) == [[6.5]]
        with pytest.raises(errors.InvalidInput, match=r"input 'x': 1e.300 does not fit into FP32"):
            await evaluate(engine, "Regressor", [1e300, 2, 3])
        with pytest.raises(errors.NotSupported, match="not all its tensors are float vectors"):
            await evaluate(engine, "TextModel", [1])
        with pytest.raises(errors.NotSupported, match="does not support Gradient"):
            await call_model(engine, "Regressor", Gradient(positional=(vector(1, 2, 3),), sens=vector(1)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from sims import Forward\nmine = Forward()\n", ""),
        ("from sims import Forward\nmine = Forward()\nother = Forward()\n", "several models, mine, other"),
        ("from sims import Forward as Base\nclass Mine(Base): pass\nmine = Mine()\n", ""),
        ("import umbridge\nclass Mine(umbridge.Model): pass\n", "failed to load"),
        ("x = 1\n", "has no model"),
        (
            "from sims import forward\nmine = forward\nif __name__ == '__main__':\n    serve_models([])\n",
            "",  # one model under two names
        ),
    ],
)
async def test_files_with_simulators_are_loaded(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "sims.py").write_text(SIMULATORS.read_text())
    (tmp_path / "mine.py").write_text(text)
    spec = ModelSpec(name="m", runtime="python", uri=str(tmp_path / "mine.py"), placement="thread")
    async with Engine(Repository([spec])) as engine:
        deployment = engine.deployments()[0]
        if message:
            assert message in deployment.reason
        else:
            assert await evaluate(engine, "m", [1, 2], [0, 0, 0]) == [[1.0, 4.0], [3.0]]


GUARD = 'expected that call behind `if __name__ == "__main__":`'
SERVES = "import umbridge as u\nfrom sims import Forward\nmodel = Forward()\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (SERVES + "u.serve_models([model], 4242)\n", 4),
        (SERVES + "from umbridge import serve_models as go\ngo([model], port=4242)\n", 5),
        (SERVES + "def main():\n    u.serve_models([model])\nif True:\n    main()\n", 5),
    ],
)
@pytest.mark.parametrize("placement", ["thread", "process"])
@pytest.mark.parametrize("attribute", ["", ":model"])
async def test_a_file_that_serves_when_it_is_imported_is_one_line(
    tmp_path: Path, text: str, line: int, placement: Any, attribute: str
) -> None:
    (tmp_path / "sims.py").write_text(SIMULATORS.read_text())
    (tmp_path / "server.py").write_text(text)
    spec = ModelSpec(name="m", runtime="python", uri=f"{tmp_path / 'server.py'}{attribute}", placement=placement)
    async with Engine(Repository([spec])) as engine:
        reason = engine.deployments()[0].reason
        assert (
            reason == f"failed to load 'm', 'server.py' calls serve_models in line {line}, which never returns; {GUARD}"
        )


def test_serve_models_is_restored_after_an_import(tmp_path: Path) -> None:
    original = umbridge.serve_models
    (tmp_path / "server.py").write_text(SERVES.replace("from sims import Forward\nmodel = Forward()\n", ""))
    restored = plugins.import_file(tmp_path / "server.py").u.serve_models
    assert restored is umbridge.serve_models is original
    with pytest.raises(errors.ModelFailed, match="calls serve_models in line 1"):
        (tmp_path / "bad.py").write_text("import umbridge; umbridge.serve_models([])\n")
        plugins.import_file(tmp_path / "bad.py")
    assert umbridge.serve_models is original
