"""Outputs that a file declares are hints: what the model returns is served, and the metadata follow."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman import FP32, FP64, INT32, INT64, TensorSpec
from dragoman.core.calls import Infer, Load, Request
from dragoman.core.datatypes import BYTES
from dragoman.core.errors import InvalidOutput
from dragoman.core.signature import Signature
from dragoman.core.tensor import Tensor
from dragoman.engine.engine import Engine
from dragoman.engine.output_hints import OutputHints, share_rows
from dragoman.engine.repository import Repository
from dragoman.engine_setup import open_engine

RETURNED: dict[str, Any] = {}


class Program(dragoman.Model):
    """A program whose file declares `y` as FP32 [1, -1], and returns what a test wants."""

    placement = "thread"
    declared = (TensorSpec("y", FP32, (1, -1)),)

    def signature(self) -> Signature:
        return Signature((TensorSpec("x", FP64, (-1,)),), self.declared, outputs_are_hints=True)

    def infer(self, call: Infer) -> Any:
        return dict(RETURNED)


async def serve(returned: dict[str, Any], *, trial: bool = True, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """Return the signature after a trial and a call, and the answer to the call."""
    RETURNED.clear()
    RETURNED.update(returned)
    spec = dragoman.ModelSpec(name="m", target=Program, runtime="python", trial_s=10 if trial else 0, **settings)
    async with Engine(Repository([spec])) as engine:
        answer = await engine.infer("m", {"x": np.zeros(1)})
        return engine.deployments()[0].loaded.signature, answer


class Wide(Program):
    """Declares the output as FP64."""

    declared = (TensorSpec("y", FP64, (1, -1)),)


async def test_integers_that_floats_would_round_stay_integers() -> None:
    RETURNED.clear()
    RETURNED["y"] = np.array([[2**53 + 1]])
    spec = dragoman.ModelSpec(name="m", target=Wide, runtime="python")
    async with Engine(Repository([spec])) as engine:
        answer = await engine.infer("m", {"x": np.zeros(1)})
        assert answer["y"].dtype == np.int64
        assert answer["y"].tolist() == [[2**53 + 1]]


@pytest.mark.parametrize("trial", [True, False])
@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (np.ones((20, 1, 4), np.float32), TensorSpec("y", FP32, (-1, -1, -1))),  # another rank
        (np.ones((3, 4), np.float32), TensorSpec("y", FP32, (-1, -1))),  # another length
        (np.ones((1, 4), np.float32), TensorSpec("y", FP32, (1, -1))),
        (np.float32(3), TensorSpec("y", FP32, ())),
        (np.ones((1, 4), np.float64), TensorSpec("y", FP64, (1, -1))),  # FP32 would lose digits
        (np.ones((1, 4), np.int64), TensorSpec("y", INT64, (1, -1))),
        (np.ones((1, 4), np.float16), TensorSpec("y", FP32, (1, -1))),  # converted: nothing is lost
        (np.array([["a"]], object), TensorSpec("y", BYTES, (1, -1))),
    ],
)
async def test_a_wrong_declaration_is_corrected_by_the_first_answer(
    value: Any, spec: TensorSpec, trial: bool, caplog: pytest.LogCaptureFixture
) -> None:
    signature, answer = await serve({"y": value}, trial=trial)
    assert signature.outputs == (spec,)
    expected = Tensor.of(value, spec.datatype).data
    assert answer["y"].tolist() == expected.tolist()
    assert answer["y"].dtype == expected.dtype
    assert caplog.text.count("metadata corrected") == (spec != Program.declared[0])


async def test_outputs_of_other_names_are_served(caplog: pytest.LogCaptureFixture) -> None:
    signature, answer = await serve({"y": np.ones((1, 2), np.float32), "extra": np.arange(3)})
    assert signature.outputs == (*Program.declared, TensorSpec("extra", INT64, (-1,)))
    assert answer["extra"].tolist() == [0, 1, 2]
    signature, answer = await serve({"renamed": np.arange(3)})
    assert list(answer) == ["renamed"]
    async with open_engine(Program) as engine:  # a request may name what the metadata have from now on
        assert list(await engine.infer("Program", {"x": np.zeros(1)}, outputs=["renamed"])) == ["renamed"]


async def test_an_author_is_taken_at_his_word() -> None:
    """Outputs in settings or code are binding: the error names what was expected."""
    with pytest.raises(InvalidOutput, match=r"output 'y': expected shape \[2, 2\], got \[1, 4\]"):
        await serve({"y": np.ones((1, 4), np.float32)}, outputs=(TensorSpec("y", FP32, (2, 2)),))
    with pytest.raises(InvalidOutput, match="output 'z' is missing: the model returned 'y'"):
        await serve({"y": np.ones((1, 4), np.float32)}, outputs=(TensorSpec("z", FP32, (2, 2)),))

    class Declared(dragoman.Model):
        placement = "thread"
        inputs = (TensorSpec("x", FP64, (-1,)),)
        outputs = (TensorSpec("y", FP64, (3,)),)

        def infer(self, call: Infer) -> Any:
            return call.inputs["x"].data

    async with open_engine(Declared) as engine:
        assert engine.deployments()[0].loaded.signature.outputs == Declared.outputs
        assert "expected shape [3], got [640]" not in engine.deployments()[0].trial_error
        with pytest.raises(InvalidOutput, match=r"expected shape \[3\], got \[1\]"):
            await engine.infer("Declared", {"x": np.zeros(1)})


def outputs(**values: Any) -> dict[str, Tensor]:
    return {name: Tensor.of(value) for name, value in values.items()}


def test_declarations_are_widened_until_they_fit_all_that_was_returned(caplog: pytest.LogCaptureFixture) -> None:
    hints = OutputHints("m")
    signature = Signature(outputs=(TensorSpec("y", FP32, (2, 3)),), outputs_are_hints=True)

    def after(value: Any) -> TensorSpec:
        nonlocal signature
        signature = hints.correct(signature, outputs(y=value))
        return signature.outputs[0]

    assert after(np.zeros((2, 3), np.float32)) == TensorSpec("y", FP32, (2, 3))
    assert after(np.zeros((2, 5), np.float32)) == TensorSpec("y", FP32, (2, -1))
    assert after(np.zeros((4, 5), np.float32)) == TensorSpec("y", FP32, (-1, -1))
    assert after(np.zeros(4, np.float32)) == TensorSpec("y", FP32, None)  # the rank varies
    assert after(np.zeros((4, 5), np.float32)) == TensorSpec("y", FP32, None)
    assert after(np.zeros(4, np.int32)) == TensorSpec("y", None, None)  # the datatype too
    settled = signature
    assert hints.correct(signature, outputs(y=np.zeros(4))) is settled
    assert caplog.text.count("metadata corrected") == 1


def test_what_is_not_declared_is_learned_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    hints = OutputHints("m")
    signature = Signature(outputs=(TensorSpec("y"),), outputs_are_hints=True)
    signature = hints.correct(signature, outputs(y=np.zeros((2, 3), np.int32)))
    assert signature.outputs == (TensorSpec("y", INT32, (-1, -1)),)
    assert hints.correct(signature, outputs(y=np.zeros((4, 1), np.int32))) is signature
    assert not caplog.text


def test_rows_of_inputs_and_outputs() -> None:
    x = outputs(x=np.zeros((2, 3)))
    assert share_rows(x, outputs(y=np.zeros(2), z=np.zeros((2, 1))))
    assert not share_rows(x, outputs(y=np.zeros(2), z=np.zeros((1, 2))))
    assert not share_rows(x, outputs(y=np.float64(1)))


async def test_calls_are_not_merged_if_the_outputs_have_other_rows(caplog: pytest.LogCaptureFixture) -> None:
    class Reduce(Program):
        declared = (TensorSpec("y", FP64, (-1, 2)),)

        def signature(self) -> Signature:
            inputs = (TensorSpec("x", FP64, (-1,)),)
            return Signature(inputs, self.declared, batched=True, outputs_are_hints=True)

        def infer(self, call: Infer) -> Any:
            return np.ones((3, 2))

    async with open_engine(Reduce) as engine:
        (deployment,) = engine.deployments()
        assert deployment.max_batch_size == 0
        assert not deployment.loaded.signature.batched
        assert "calls are not merged" in caplog.text
    async with open_engine(Reduce, trial_s=0) as engine:
        assert engine.deployments()[0].max_batch_size == 64


async def test_a_batch_size_for_a_model_without_rows_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    RETURNED.clear()
    RETURNED["y"] = np.ones((1, 2), np.float32)
    async with open_engine(Program, max_batch_size=8) as engine:
        assert engine.deployments()[0].max_batch_size == 0
    assert "max_batch_size not used" in caplog.text


async def test_a_corrected_version_shares_requests_with_others(tmp_path: Path) -> None:
    """Versions with weights may return outputs of different lengths: their metadata differ once one has answered."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    for version in ("1", "2"):
        folder = tmp_path / "m" / version
        folder.mkdir(parents=True)
        graph = helper.make_graph(
            [helper.make_node("Identity", ["x"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", 1, ["n", "k"])],
            [helper.make_tensor_value_info("y", 1, [1, 7])],
        )
        opsets = [helper.make_opsetid("", 13)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / "model.onnx")
    (tmp_path / "m" / "dragoman.toml").write_text('[model]\ntrial_s = 0\n[model.version_weights]\n"1" = 1\n"2" = 1\n')
    async with open_engine(tmp_path, control_token="token") as engine:
        for version in ("1", "2"):
            x = {"x": np.ones((2, 3), np.float32)}
            assert (await engine.infer("m", x, version=version))["y"].shape == (2, 3)
        await engine.call(Request(Load(token="token"), "m", "2"))  # as its file declares it
        shapes = {d.spec.version: d.loaded.signature.outputs[0].shape for d in engine.deployments()}
        assert shapes == {"1": (-1, -1), "2": (1, 7)}
        assert all([(await engine.infer("m", {"x": np.ones((2, 3), np.float32)}))["y"].size == 6 for _ in range(8)])
