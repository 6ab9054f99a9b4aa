"""The client of the umbridge package against a server process."""

import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import umbridge

from e2e.server_process import ServerProcess, running_server
from features.simulators.conftest import SIMULATORS

POINT = [[1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.fixture(scope="module")
def forward(simulators: ServerProcess) -> Any:
    return umbridge.HTTPModel(f"http://{simulators.url}", "forward")


def test_models_are_listed(simulators: ServerProcess) -> None:
    assert umbridge.supported_models(f"http://{simulators.url}") == ["Double", "Faulty", "Points", "Slow", "forward"]
    with pytest.raises(Exception, match="not supported by server"):
        umbridge.HTTPModel(f"http://{simulators.url}", "backward")


def test_supported_operations(simulators: ServerProcess, forward: Any) -> None:
    assert forward.supports_evaluate()
    assert forward.supports_gradient()
    assert forward.supports_apply_jacobian()
    assert forward.supports_apply_hessian()
    double = umbridge.HTTPModel(f"http://{simulators.url}", "Double")
    assert (double.supports_evaluate(), double.supports_gradient()) == (True, False)
    assert (double.supports_apply_jacobian(), double.supports_apply_hessian()) == (False, False)


def test_sizes_depend_on_the_config(forward: Any) -> None:
    assert (forward.get_input_sizes(), forward.get_output_sizes()) == ([2, 3], [2, 1])
    assert (forward.get_input_sizes({"n": 4}), forward.get_output_sizes({"n": 4})) == ([4, 3], [4, 1])


def test_evaluate(forward: Any) -> None:
    assert forward(POINT) == [[1.0, 4.0], [53.0]]
    assert forward([[1, 2, 3], [0, 0, 0]], {"n": 3, "scale": 10}) == [[10.0, 40.0, 90.0], [6.0]]


def test_derivatives_of_the_model(forward: Any) -> None:
    assert forward.gradient(0, 0, POINT, [1.0, 10.0]) == [2.0, 40.0]
    assert forward.gradient(1, 1, POINT, [0.5]) == [3.0, 4.0, 5.0]
    assert forward.gradient(1, 0, [[1, 2, 3], [0, 0, 0]], [2.0], {"n": 3}) == [2.0, 2.0, 2.0]
    assert forward.apply_jacobian(0, 0, POINT, [1.0, -1.0]) == [2.0, -4.0]
    assert forward.apply_jacobian(1, 1, POINT, [1.0, 1.0, 1.0]) == [24.0]
    assert forward.apply_hessian(1, 1, 1, POINT, [2.0], [1.0, 2.0, 3.0]) == [4.0, 8.0, 12.0]
    assert forward.apply_hessian(0, 0, 1, POINT, [1.0, 1.0], [1.0, 2.0, 3.0]) == [0.0, 0.0]


def test_errors_reach_the_client_with_type_and_message(simulators: ServerProcess, forward: Any) -> None:
    with pytest.raises(Exception, match=r"type InvalidInput: input 1 \('input_1'\): expected 3 numbers, got 2"):
        forward([[1, 2], [3, 4]])
    faulty = umbridge.HTTPModel(f"http://{simulators.url}", "Faulty")
    with pytest.raises(Exception, match=r"type ModelError: .*ValueError: the mesh is tangled"):
        faulty([[10]])
    with pytest.raises(Exception, match=r"type InvalidOutput: .*output 'output_0': element 1 is nan"):
        faulty([[1]])


def test_infinities_roundtrip(simulators: ServerProcess) -> None:
    faulty = umbridge.HTTPModel(f"http://{simulators.url}", "Faulty")
    assert faulty([[2]]) == [[np.inf, -np.inf]]


def test_four_replicas_answer_four_calls_at_a_time(simulators: ServerProcess) -> None:
    slow = umbridge.HTTPModel(f"http://{simulators.url}", "Slow")
    responses: list[Any] = []
    threads = [threading.Thread(target=lambda i=i: responses.append(slow([[float(i)]]))) for i in range(2, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(responses) == [[[float(i)]] for i in range(2, 10)]


def test_a_server_at_the_default_port(tmp_path: Path) -> None:
    """`--umbridge-port` is a second HTTP port; models are found in their files without changes."""
    (tmp_path / "sim.py").write_text(SIMULATORS.read_text().partition("class Points")[0])
    with running_server(str(tmp_path / "sim.py"), "--umbridge-port", "0", "--placement", "thread") as process:
        pattern = rf"HTTP +http://{process.url}, (http://\S+)"  # printed when the ports are open already
        while (found := re.search(pattern, process.log())) is None:
            assert process.popen.poll() is None
            time.sleep(0.01)
        model = umbridge.HTTPModel(found[1], "forward")
        assert model(POINT) == [[1.0, 4.0], [53.0]]
