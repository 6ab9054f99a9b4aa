"""kserve: the clients of its package for Open Inference over REST and gRPC, and for the V1 protocol."""

from typing import Any

import kserve_messages  # noqa: F401 (before kserve)
import numpy as np
import pytest

kserve: Any = pytest.importorskip("kserve")

pytestmark = pytest.mark.filterwarnings("ignore")
X = np.array([[1.5, -2], [0, 3]], np.float32)
TEXTS = np.array([b"a", b"bc"], np.object_)


def request(name: str = "Doubler") -> Any:
    inputs = [kserve.InferInput("x", [2, 2], "FP32"), kserve.InferInput("s", [2], "BYTES")]
    for each, values in zip(inputs, (X, TEXTS), strict=True):
        each.set_data_from_numpy(values, binary_data=False)
    return kserve.InferRequest(model_name=name, infer_inputs=inputs)


def check(response: Any) -> None:
    found = {each.name: each for each in response.outputs}
    np.testing.assert_array_equal(np.asarray(found["y"].as_numpy()).reshape(2, 2), X * 2)
    texts = [each if isinstance(each, bytes) else str(each).encode() for each in found["t"].as_numpy()]
    assert texts == [b"aa", b"bcbc"]


@pytest.fixture
def rest() -> Any:
    return kserve.InferenceRESTClient(kserve.inference_client.RESTConfig(protocol="v2"))


async def test_rest(rest: Any, url: str) -> None:
    assert await rest.is_server_live(url)
    assert await rest.is_server_ready(url)
    assert await rest.is_model_ready(url, "Doubler")
    check(await rest.infer(url, request(), model_name="Doubler"))


async def test_rest_errors(rest: Any, url: str) -> None:
    with pytest.raises(Exception, match="404"):
        await rest.infer(url, request("none"), model_name="none")


async def test_grpc(grpc_url: str) -> None:
    client = kserve.InferenceGRPCClient(grpc_url)
    assert await client.is_server_live()
    assert await client.is_server_ready()
    assert await client.is_model_ready("Doubler")
    check(await client.infer(request()))
    await client.close()
