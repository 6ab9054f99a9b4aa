"""Triton with its Python backend, from the wheel of PyTriton: one identity.

usage: python pytriton_server.py HTTP_PORT GRPC_PORT MODEL...
"""

import sys
from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

SHAPES = {"Identity": (16,), "IdentityImage": (3, 224, 224)}


@batch  # type: ignore[untyped-decorator]
def identity(INPUT0: Any) -> Any:  # noqa: N803 it is the tensor's name
    return {"OUTPUT0": INPUT0}


if __name__ == "__main__":
    places: dict[str, Any] = {"http_port": int(sys.argv[1]), "grpc_port": int(sys.argv[2])}
    places |= {"http_address": "127.0.0.1", "grpc_address": "127.0.0.1"}
    with Triton(config=TritonConfig(allow_metrics=False, log_verbose=0, **places)) as triton:
        for name in sys.argv[3:]:
            shape = SHAPES[name]
            triton.bind(
                model_name=name,
                infer_func=identity,
                inputs=[Tensor(name="INPUT0", dtype=np.float32, shape=shape)],
                outputs=[Tensor(name="OUTPUT0", dtype=np.float32, shape=shape)],
                config=ModelConfig(max_batch_size=64),
            )
        triton.serve()
