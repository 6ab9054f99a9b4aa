"""`dragoman check derivatives` reports correct and wrong derivatives."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.cli import main
from dragoman_simulators.derivatives.checks import STEPS, CheckResult, Tolerance, run_checks
from features.simulators.derivatives.derivative_models import build

X, Y = np.array([0.3, -0.8]), np.array([0.5, 1.5, -0.2])


def two_outputs(x: Any, y: Any) -> Any:
    return np.sin(x).sum() * y.sum(), y * x[0] ** 2


def jacobian(x: Any, y: Any, output: int, input: int) -> Any:  # noqa: A002
    one = np.array([2 * x[0] * y, 0 * y]).T if input == 0 else np.eye(3) * x[0] ** 2
    return [np.outer(1, np.cos(x) * y.sum() if input == 0 else np.ones(3) * np.sin(x).sum()), one][output]


def hessian(x: Any, y: Any, sens: Any, vec: Any, output: int, input1: int, input2: int) -> Any:
    h = 1e-30
    moved = [x + (input2 == 0) * 1j * h * np.resize(vec, 2), y + (input2 == 1) * 1j * h * np.resize(vec, 3)]
    slope = jacobian(moved[0], moved[1], output, input1).T @ sens
    return np.imag(slope) / h


def with_error(function: Callable[..., Any], where: Mapping[str, int], by: float) -> Callable[..., Any]:
    """Return the function with `by` added to one entry, for the output and inputs in `where`."""

    def wrong(x: Any, y: Any, **arguments: Any) -> Any:
        values = np.array(function(x, y, **arguments))
        if all(arguments[key] == value for key, value in where.items()):
            values.flat[0] += by
        return values

    return wrong


def wrong_jacobian(output: int, at: int, by: float) -> Callable[..., Any]:
    change = with_error(jacobian, {"output": output, "input": at}, by)

    def changed(x: Any, y: Any, output: int, input: int) -> Any:  # noqa: A002
        return change(x, y, output=output, input=input)

    return changed


def wrong_hessian(where: Mapping[str, int], by: float) -> Callable[..., Any]:
    change = with_error(hessian, where, by)

    def changed(x: Any, y: Any, sens: Any, vec: Any, output: int, input1: int, input2: int) -> Any:
        return change(x, y, sens=sens, vec=vec, output=output, input1=input1, input2=input2)

    return changed


def check_results(**derivatives: Any) -> dict[tuple[Any, ...], CheckResult]:
    function = build(lambda x, y: two_outputs(x, y), inputs=[2, 3], outputs=[1, 3], derivatives=None, **derivatives)
    results = run_checks(function, [(X, Y), (2 * X, Y + 1)], {}, 3, Tolerance())
    return {(f.check, f.output, *f.inputs): f for f in results}


def test_correct_derivatives_pass_and_converge_at_order_two() -> None:
    results = check_results(jacobian=jacobian, apply_hessian=hessian)
    assert len(results) == 2 * (2 * 3 + 4 + 3)
    assert all(f.passed for f in results.values()), [f for f in results.values() if not f.passed]
    nonlinear = results["apply_jacobian", 0, 0]
    assert nonlinear.order == pytest.approx(2, abs=0.1)
    assert [step for step, _ in nonlinear.curve] == list(STEPS)
    assert results["apply_jacobian", 0, 1].order is None  # linear, so that differences are exact


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("by", [1e-4, 10.0])
def test_a_wrong_entry_of_a_jacobian_is_reported(output: int, at: int, by: float) -> None:
    results = check_results(jacobian=wrong_jacobian(output, at, by))
    failed = {key for key, f in results.items() if not f.passed}
    assert failed == {("apply_jacobian", output, at), ("gradient", output, at)}


@pytest.mark.parametrize("where", [{"output": 0, "input1": 0, "input2": 1}, {"output": 1, "input1": 1, "input2": 0}])
def test_a_wrong_entry_of_a_hessian_is_reported(where: Mapping[str, int]) -> None:
    results = check_results(jacobian=jacobian, apply_hessian=wrong_hessian(where, 1e-3))
    failed = {key for key, f in results.items() if not f.passed}
    o = where["output"]
    assert failed == {("apply_hessian", o, where["input1"], where["input2"]), ("symmetry", o, 0, 1)}


def test_a_wrong_adjoint_is_reported() -> None:
    def gradient(x: Any, y: Any, sens: Any, output: int, input: int) -> Any:  # noqa: A002
        return jacobian(x, y, output, input).T @ sens * (1 + 1e-7)

    results = check_results(jacobian=jacobian, gradient=gradient)
    assert {key[0] for key, f in results.items() if not f.passed} == {"adjoint"}


def test_nan_is_reported_as_wrong() -> None:
    def gradient(x: Any, y: Any, sens: Any, output: int, input: int) -> Any:  # noqa: A002
        return jacobian(x, y, output, input).T @ sens * np.nan

    assert not any(f.passed for f in check_results(gradient=gradient).values())


# --- the command ------------------------------------------------------------------------------------------

MODEL = """
import numpy as np
import dragoman
from features.simulators.derivatives.derivative_models import build


@dragoman.vector_function(inputs={"x": 2}, outputs={"y": 1}, at=[[1.0, 2.0]])
def right(x, *, power: int = 3):
    return (x**power).sum()


@dragoman.vector_function(inputs=[2], outputs=[1], derivatives=None, gradient=lambda x: 2 * x)
def wrong(x):
    return (x**3).sum()


@dragoman.vector_function(inputs=[2], outputs=[1], derivatives=None)
def none(x):
    return (x**3).sum()


def rejecting(x):
    raise dragoman.errors.InvalidInput("no derivative here")


@dragoman.vector_function(inputs=[2], outputs=[1], derivatives=None, gradient=rejecting)
def failing(x):
    return (x**3).sum()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "checked_functions.py"
    path.write_text(MODEL)
    return path


def run(*arguments: object) -> int:
    return main(["check", "derivatives", *map(str, arguments)])


def test_the_command_reports_correct_derivatives(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{model}:right", "--config", '{"power": 4}') == 0
    message = capsys.readouterr().out
    assert "gradient by complex step" in message
    assert message.count(" ok\n") == 5
    assert "all checks passed, at 5 points" in message


def test_the_command_reports_its_progress_if_it_takes_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "slow.py"
    path.write_text(
        "import time\nimport dragoman\n"
        "@dragoman.vector_function(inputs=[1], outputs=[1], jacobian=lambda x: [[2.0]])\n"
        "def slow(x):\n    time.sleep(0.1)\n    return 2 * x\n"
    )
    monkeypatch.setattr("dragoman_simulators.cli.derivatives.PROGRESS_S", 0.05)
    assert run(f"{path}:slow", "--points", "2", "--json") == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert re.fullmatch(r"slow: checks at point 2 of 2, \d+ calls, \d+ s", lines[-1])
    stages = dict.fromkeys(line.rpartition(" of")[0] or line.partition(",")[0] for line in lines)
    assert list(stages)[-2:] == ["slow: checks at point 1", "slow: checks at point 2"]
    assert json.loads(captured.out)[0]["points"] == 2


def test_the_command_reports_wrong_derivatives(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{model}:wrong", "--at", "[[1, 2]]", "--at", "[[3, 1]]") == 1
    message = capsys.readouterr().out
    assert "gradient  output_0  x " in message
    assert "WRONG" in message
    assert "1 of 1 checks failed, at 2 points" in message


NOISY = """
import numpy as np
import dragoman


def rounded(x, share=1.0):
    return np.array([float(f"{share * each:.5g}") for each in (x[0] ** 2 + x[1], x[0] * x[1])])


@dragoman.vector_function(inputs={"x": 2}, outputs=[2], derivatives="finite differences")
def noisy(x):
    return rounded(x)


def slope(x, sens):
    return FACTOR * np.array([[2 * x[0], 1], [x[1], x[0]]]).T @ sens


@dragoman.vector_function(inputs={"x": 2}, outputs=[2], gradient=slope, derivatives=None)
def written(x):
    return rounded(x)
"""


@pytest.mark.parametrize(("factor", "status"), [("1.001", 0), ("1.05", 1)])
def test_approximate_derivatives_of_a_noisy_function_pass_up_to_one_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: str, status: int
) -> None:
    path = tmp_path / "noisy_functions.py"
    path.write_text(NOISY.replace("FACTOR", factor))
    at = ("--at", "[[1.3, 0.7]]")
    run(f"{path}:noisy", *at)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if line.split()[:1] in (["apply_jacobian"], ["gradient"])] == ["ok"] * 2
    assert "errors up to 0.01 pass, as the derivatives are approximate" in lines[-1]
    assert run(f"{path}:written", *at) == 1  # of derivatives that claim to be exact
    assert ("use --tolerance 0.01 --identity 0.01" in capsys.readouterr().out) or status
    assert run(f"{path}:written", *at, "--tolerance", "0.01") == status


def test_the_command_prints_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{model}:wrong", "--at", "[[1, 2]]", "--json") == 1
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["model"], result["methods"], result["points"]) == ("wrong", {"gradient": "author"}, 1)
    (check,) = result["checks"]
    assert (check["check"], check["output"], check["inputs"], check["passed"]) == ("gradient", "output_0", ["x"], False)
    assert check["error"] > 0.1
    assert [each["step"] for each in check["curve"]] == list(STEPS)
    assert all(each["error"] > 0.1 for each in check["curve"])


def test_the_command_reports_errors_of_the_function(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{model}:failing") == 1
    assert "REFUSED: no derivative here" in capsys.readouterr().out
    assert run(f"{model}:none") == 2
    assert "none: no derivatives" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--at", "[[1]]"), "--at: expected vectors of [2] numbers, got [1]"),
        (("--at", "{}"), "--at: expected a list"),
        (("--config", "[1]"), "--config: expected an object, got '[1]'"),
        (("--config", "{"), "--config: expected JSON"),
        (("--model", "left"), "unknown model 'left'"),
        (("--config", '{"powers": 1}'), "unexpected entry 'powers'"),
    ],
)
def test_invalid_arguments_of_the_command(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status = run(f"{model}:right", *arguments)
    captured = capsys.readouterr()
    assert status == 2
    assert message in captured.err + captured.out


def test_a_model_on_a_server_is_checked(
    model: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    serve_model: Callable[[Any], str],
) -> None:
    url = serve_model(f"{model}:right")
    assert run(url, "--model", "right", "--at", "[[1, 2]]") == 0
    assert "all checks passed, at 1 point\n" in capsys.readouterr().out
    assert run(url, "--at", "[[1, 2]]") == 0  # the only one
    assert "  gradient        y       x  " in capsys.readouterr().out  # names that UM-Bridge does not have
    url = serve_model(str(model))
    assert run(url) == 2
    assert "one of ['failing', 'none', 'right', 'wrong']" in caplog.text


WRONG = """
import jax.numpy as jnp
import numpy as np
import dragoman
from features.simulators.derivatives.derivative_models import build


def by_complex_step(function):
    return lambda x: np.stack([np.atleast_1d(np.imag(function(x + 1e-30j * e))) / 1e-30 for e in np.eye(2)], 1)


def branch(x):
    r = np.array([x[0], x[1]])
    return abs(r[0]) * r[1] if np.abs(r[0]) > 1 else r[0] * r[1]


def pieces(x):
    x = np.asarray(x)
    return np.where(x.real > 0, x**2, 3 * np.abs(x))


def lengths(x):
    return np.array([1e8 * x[0] * x[1], np.linalg.norm(np.array([x[0], x[1]]))])


def power(x):
    return x[0] ** 120 + x[1]


for function, outputs, at in ((branch, 1, None), (pieces, 2, None), (lengths, 2, None), (power, 1, [[-1.01, 1.0]])):
    mark = dragoman.vector_function(
        inputs=[2], outputs=[outputs], at=at, derivatives=None, jacobian=by_complex_step(function)
    )
    mark(function)


@dragoman.vector_function(inputs=[2], outputs=[1], at=[[2.1e11, 0.012]], derivatives="jax")
def wave(x):
    return jnp.sin(x[1] / 0.01) * jnp.log(x[0])


@dragoman.vector_function(inputs=[2], outputs=[1], at=[[2.1e11, 1.2e-9]], derivatives="jax")
def tiny(x):
    return jnp.sin(x[1] / 1e-9) * jnp.log(x[0])


@dragoman.vector_function(inputs=[2], outputs=[1], derivatives="torch")
def leaking(x):
    return x[0].item() * x[1] ** 2


@dragoman.vector_function(inputs=[2], outputs=[1], derivatives="jax")
def leaking_too(x):
    return x[0].item() * x[1] ** 2


@dragoman.vector_function(inputs=[2], outputs=[1], derivatives="jax")
def nowhere(x):
    return jnp.log(-x[0] ** 2)
"""


def test_each_element_is_checked_at_its_own_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong_functions.py"
    path.write_text(WRONG)
    for name in ("branch", "pieces", "lengths", "power"):
        assert run(f"{path}:{name}") == 1
        message = capsys.readouterr().out
        assert "WRONG: element " in message
        assert "2 of 3 checks failed, at 5 points" in message
    for name, source in (("leaking", "torch"), ("leaking_too", "jax")):
        assert run(f"{path}:{name}") == 1
        assert f"REFUSED: Gradient of '{name}' by {source} is not confirmed" in capsys.readouterr().out
    for name in ("wave", "tiny"):
        assert run(f"{path}:{name}") == 0
        assert "all checks passed, at 5 points" in capsys.readouterr().out
    assert run(f"{path}:nowhere") == 2
    assert "no finite values at any random point; name points of its domain with --at" in capsys.readouterr().out
