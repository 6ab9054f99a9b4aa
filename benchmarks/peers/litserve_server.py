"""LitServe's identity: one worker, one front end.

usage: python litserve_server.py HTTP_PORT GRPC_PORT MODEL...
"""

import sys
from typing import Any

import litserve
import numpy as np


class Identity(litserve.LitAPI):  # type: ignore[misc]
    def setup(self, device: str) -> None:
        """There is nothing to load."""

    def decode_request(self, request):  # type: ignore[no-untyped-def] # a type would be read as that of a query
        return np.asarray(request["input"], np.float32)

    def predict(self, x: Any) -> Any:
        return x

    def encode_response(self, output: Any) -> Any:
        return {"output": output.tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(Identity(), accelerator="cpu", workers_per_device=1)
    server.run(port=int(sys.argv[1]), num_api_servers=1, generate_client_file=False, log_level="warning")
