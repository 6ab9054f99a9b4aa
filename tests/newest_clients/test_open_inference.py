"""Other clients of Open Inference: tritony, which sends a timeout with every request, and open-inference-openapi."""

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore")
X = np.array([[1.5, -2], [0, 3]], np.float32)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritony(url: str, grpc_url: str, protocol: str) -> None:
    tritony: Any = pytest.importorskip("tritony")
    address = url.removeprefix("http://") if protocol == "http" else grpc_url
    client = tritony.InferenceClient.create_with("Tripler", address, input_dims=1, protocol=protocol)
    np.testing.assert_array_equal(client(X), 3 * X)  # a request for each row


def test_open_inference_openapi(url: str) -> None:
    openapi: Any = pytest.importorskip("open_inference.openapi.client")
    client = openapi.OpenInferenceClient(base_url=url)
    client.check_server_liveness()
    client.check_server_readiness()
    client.check_model_readiness("Doubler")
    assert client.read_server_metadata().name == "dragoman"
    assert [each.name for each in client.read_model_metadata("Doubler").inputs] == ["x", "s"]
    inputs = [
        {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": X.ravel().tolist()},
        {"name": "s", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]},
    ]
    response = client.model_infer("Doubler", request=openapi.InferenceRequest(id="7", inputs=inputs))
    assert (response.id, response.model_name) == ("7", "Doubler")
    y, t = response.outputs
    assert (y.name, y.shape, t.name) == ("y", [2, 2], "t")
    np.testing.assert_array_equal(np.array(getattr(y.data, "__root__", y.data)).reshape(2, 2), 2 * X)
