"""Messages of the package kserve in a descriptor pool of their own: import this before kserve.

kserve and tritonclient register messages of the same names (`inference.*`) in protobuf's default pool, which accepts
each name once, so that one process can import only one of them. Tests of both run in one process. Processes of servers,
which import kserve as its users do, are not affected.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool

_NAME = "kserve.protocol.grpc.grpc_predict_v2_pb2"


def _load() -> None:
    package = importlib.util.find_spec("kserve")
    if package is None or package.origin is None or _NAME in sys.modules:
        return
    file = Path(package.origin).parent / "protocol" / "grpc" / "grpc_predict_v2_pb2.py"
    spec = importlib.util.spec_from_file_location(_NAME, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    pool = descriptor_pool.DescriptorPool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descriptor_pool, "Default", lambda: pool)
        spec.loader.exec_module(module)
    sys.modules[_NAME] = module


_load()
