"""Send requests to the served examples over REST and gRPC with tritonclient.

Run `dragoman serve examples/tabular/models --allow-pickle`, then `python examples/tabular/tabular_client.py`.
"""

import argparse
from typing import Any

import tritonclient.grpc
import tritonclient.http
from sklearn import datasets

# Model, data set, divisor of its values, datatype, input, output.
REQUESTS = [
    ("breast-cancer", "breast_cancer", 1, "FP64", "input", "predict"),
    ("breast-cancer-xgboost", "breast_cancer", 1, "FP32", "input", "label"),
    ("wine", "wine", 1, "FP64", "input", "predict"),
    ("digits-onnx", "digits", 16, "FP32", "X", "label"),
    ("digits-torchscript", "digits", 16, "FP32", "input", "output-0"),
]


def infer(protocol: Any, client: Any, model: str, rows: Any, datatype: str, names: tuple[str, str]) -> Any:
    """Send all rows as binary data; return the output as an array."""
    tensor = protocol.InferInput(names[0], list(rows.shape), datatype)
    tensor.set_data_from_numpy(rows.astype({"FP32": "float32", "FP64": "float64"}[datatype]))
    wanted = protocol.InferRequestedOutput(names[1])
    return client.infer(model, [tensor], outputs=[wanted]).as_numpy(names[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", default="127.0.0.1:8080")
    parser.add_argument("--grpc", default="127.0.0.1:8081")
    given = parser.parse_args()
    clients = {
        "REST": (tritonclient.http, tritonclient.http.InferenceServerClient(given.http)),
        "gRPC": (tritonclient.grpc, tritonclient.grpc.InferenceServerClient(given.grpc)),
    }
    for model, data, scale, datatype, *names in REQUESTS:
        rows, labels = getattr(datasets, f"load_{data}")(return_X_y=True)
        for name, (protocol, client) in clients.items():
            answer = infer(protocol, client, model, rows[:50] / scale, datatype, (names[0], names[1]))
            predicted = answer.argmax(axis=1) if answer.ndim > 1 else answer
            right = int((predicted == labels[:50]).sum())
            print(f"{model:24} {name}  {right} of 50 right, the first five: {predicted[:5].tolist()}")
    for _, client in clients.values():
        client.close()


if __name__ == "__main__":
    main()
