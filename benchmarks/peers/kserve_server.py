"""KServe's identity, quiet.

usage: python kserve_server.py HTTP_PORT GRPC_PORT MODEL...
"""

import logging
import sys
from typing import Any

from kserve import InferOutput, InferResponse, Model, ModelServer


class Identity(Model):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ready = True

    async def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:
        (options,) = payload.inputs
        binary = payload.use_binary_outputs
        output = InferOutput(name="OUTPUT0", shape=options.shape, datatype=options.datatype)
        output.set_data_from_numpy(options.as_numpy(), binary_data=binary)
        return InferResponse(
            response_id=payload.id,
            model_name=self.name,
            infer_outputs=[output],
            use_binary_outputs=binary,
            requested_outputs=payload.request_outputs,
        )


if __name__ == "__main__":
    logging.disable(logging.INFO)
    ports = {"http_port": int(sys.argv[1]), "grpc_port": int(sys.argv[2])}
    ModelServer(workers=1, enable_latency_logging=False, **ports).start([Identity(name) for name in sys.argv[3:]])
