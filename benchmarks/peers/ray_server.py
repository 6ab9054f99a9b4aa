"""Ray Serve's identity: one replica.

usage: python ray_server.py HTTP_PORT GRPC_PORT MODEL...
"""

import signal
import sys
from typing import Any

import numpy as np
import ray
from ray import serve


@serve.deployment(num_replicas=1, max_ongoing_requests=128, ray_actor_options={"num_cpus": 0})
class Identity:
    async def __call__(self, request: Any) -> Any:
        array = np.asarray((await request.json())["input"], np.float32)
        return {"output": array.tolist()}


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, object_store_memory=200 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    config: Any = Identity
    serve.run(config.bind(), route_prefix="/predict")
    signal.pause()
