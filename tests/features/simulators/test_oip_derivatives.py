"""Derivatives over the Open Inference Protocol, REST and gRPC."""

import json
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from e2e.server_process import ServerProcess

ONES = {"sens": [1.0, 1.0]}
INPUTS = {"input_0": [1.0, 2.0], "input_1": [3.0, 4.0, 5.0]}


def body(inputs: dict[str, list[float]], **parameters: Any) -> dict[str, Any]:
    tensors = [{"name": k, "datatype": "FP64", "shape": [len(v)], "data": v} for k, v in inputs.items()]
    return {"inputs": tensors, "parameters": parameters}


@pytest.mark.parametrize(
    ("vectors", "parameters", "expected"),
    [
        ({"sens": [1.0, 10.0]}, {"derivative": "gradient"}, [2.0, 40.0]),
        ({"sens": [0.5]}, {"derivative": "gradient", "output": "output_1", "input": "input_1"}, [3.0, 4.0, 5.0]),
        ({"sens": [1.0, 1.0]}, {"derivative": "gradient", "config": '{"scale": 3}'}, [6.0, 12.0]),
        ({"vec": [1.0, -1.0]}, {"derivative": "apply_jacobian", "output": 0, "input": 0}, [2.0, -4.0]),
        (
            {"sens": [2.0], "vec": [1.0, 2.0, 3.0]},
            {"derivative": "apply_hessian", "output": 1, "input1": 1, "input2": "input_1"},
            [4.0, 8.0, 12.0],
        ),
    ],
)
def test_an_inference_request_for_a_derivative(
    simulators: ServerProcess, vectors: dict[str, list[float]], parameters: dict[str, Any], expected: list[float]
) -> None:
    status, response, _ = simulators.request("POST", "/v2/models/forward/infer", body(INPUTS | vectors, **parameters))
    assert status == 200, response
    (output,) = response["outputs"]
    assert (output["name"], output["datatype"], output["data"]) == (parameters["derivative"], "FP64", expected)


@pytest.mark.parametrize(
    ("inputs", "parameters", "message"),
    [
        (INPUTS, {"derivative": "gradient"}, "'gradient' needs the vector 'sens'"),
        (
            INPUTS | {"sens": [1.0]},
            {"derivative": "gradient"},
            "'output_0': expected 2 numbers, got 1",
        ),
        (
            INPUTS | ONES,
            {"derivative": "gradient", "output": 7},
            "expected an index from 0 to 1, got 7",
        ),
        (INPUTS | ONES, {"derivative": "gradient", "output": 0.5}, "parameter 'output'"),
        (INPUTS | ONES, {"derivative": "gradient", "config": "{"}, "parameter 'config'"),
        (INPUTS | ONES | {"z": [1.0]}, {"derivative": "gradient"}, "unexpected input 'z'"),
    ],
)
def test_errors_name_the_invalid_parameter(
    simulators: ServerProcess, inputs: Any, parameters: dict[str, Any], message: str
) -> None:
    status, response, _ = simulators.request("POST", "/v2/models/forward/infer", body(inputs, **parameters))
    assert status == 400
    assert message in response["error"]


def test_metadata_list_the_derivatives_and_their_source(simulators: ServerProcess) -> None:
    _, response, _ = simulators.request("GET", "/v2/models/Points")
    assert response["details"] == {"derivatives": {"gradient": "author"}}
    assert "details" in json.dumps(response)


def infer_binary(simulators: ServerProcess, client: Any, vectors: dict[str, list[float]], derivative: str) -> Any:
    address = simulators.url if client is triton_http else simulators.grpc_url
    inputs = []
    for name, values in (INPUTS | vectors).items():
        one = client.InferInput(name, [len(values)], "FP64")
        one.set_data_from_numpy(np.array(values))
        inputs.append(one)
    with client.InferenceServerClient(address) as connection:
        return connection.infer("forward", inputs, parameters={"derivative": derivative}).as_numpy(derivative)


@pytest.mark.parametrize("client", [triton_http, triton_grpc])
def test_derivatives_in_binary_form(simulators: ServerProcess, client: Any) -> None:
    result = infer_binary(simulators, client, {"sens": [1.0, 10.0]}, "gradient")
    assert result.tolist() == [2.0, 40.0]


@pytest.mark.parametrize("client", [triton_http, triton_grpc])
@pytest.mark.parametrize(
    ("derivative", "vectors", "message"),
    [
        ("gradient", {"sens": [1.0, np.nan]}, r"sens\[1\]: expected a finite number, got nan"),
        ("apply_jacobian", {"vec": [np.inf, 1.0]}, r"vec\[0\]: expected a finite number, got inf"),
        (
            "apply_hessian",
            {"sens": [1.0, -np.inf], "vec": [1.0, 1.0]},
            r"sens\[1\]: expected a finite number, got -inf",
        ),
        ("apply_hessian", {"sens": [1.0, 1.0], "vec": [np.nan, 1.0]}, r"vec\[0\]: expected a finite number, got nan"),
    ],
)
def test_sens_and_vec_must_be_finite(
    simulators: ServerProcess, client: Any, derivative: str, vectors: dict[str, list[float]], message: str
) -> None:
    with pytest.raises(InferenceServerException, match=message):
        infer_binary(simulators, client, vectors, derivative)
