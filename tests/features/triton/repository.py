"""A small model repository of Triton, written by hand for the tests."""

from pathlib import Path

import onnx
from onnx import TensorProto, helper

# Tensors of the models that add and subtract.
ADD_SUB = """
input [
  { name: "INPUT0" data_type: TYPE_INT32 dims: [ 4 ] },
  { name: "INPUT1" data_type: TYPE_INT32 dims: [ 4 ] }
]
output [
  { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 4 ] },
  { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 4 ] }
]
"""

# Tensors and first lines of models with one number. `.exec(` in the source makes them run in the server's process.
NUMBER_TENSORS = """
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
"""
NUMBER_HEAD = """
import json
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

# request.exec(


def number(request):
    return int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])


def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value]))])


"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_add_sub(path: Path, kind: int = TensorProto.INT32, width: int = 4) -> None:
    """Write an ONNX graph whose outputs are the sum and the difference of its inputs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {
        n: helper.make_tensor_value_info(n, kind, ["N", width]) for n in ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1")
    }
    nodes = [
        helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
    ]
    graph = helper.make_graph(nodes, "g", list(values.values())[:2], list(values.values())[2:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)


def write_repository(root: Path) -> None:
    write_add_sub(root / "simple" / "1" / "model.onnx")
    write_add_sub(root / "simple" / "3" / "model.onnx")
    write(root / "simple" / "labels.txt", "zero\none\ntwo\nthree")
    simple = ADD_SUB.replace('"OUTPUT0"', '"OUTPUT0" label_filename: "labels.txt"')
    policy = "version_policy { specific { versions: [ 1, 3 ] } }\n"
    write(root / "simple" / "config.pbtxt", f'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n{policy}{simple}')
    write(root / "py" / "config.pbtxt", PYTHON_CONFIG + ADD_SUB)
    write(root / "py" / "1" / "model.py", PYTHON)
    write(root / "py" / "1" / "helper.py", "def subtract(a, b):\n    return a - b\n")
    write(root / "codes" / "config.pbtxt", CODES_CONFIG)
    write(root / "codes" / "1" / "model.py", CODES)
    rows = ADD_SUB.replace("[ 4 ]", "[ -1, 4 ]")
    write(root / "bls" / "config.pbtxt", f'backend: "python"\ninstance_group {{ count: 2 }}\n{rows}')
    write(root / "bls" / "1" / "model.py", BLS)
    write(root / "repeat" / "config.pbtxt", REPEAT_CONFIG)
    write(root / "repeat" / "1" / "model.py", REPEAT)
    write(root / "widths" / "config.pbtxt", WIDTHS_CONFIG)
    write(root / "widths" / "1" / "model.py", WIDTHS)
    write(root / "completed" / "1" / "model.py", COMPLETED)
    (root / "ensemble" / "1").mkdir(parents=True)
    write(root / "ensemble" / "config.pbtxt", f'platform: "ensemble"\nmax_batch_size: 8\n{ADD_SUB}{STEPS}')


PYTHON_CONFIG = """
backend: "python"
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 20000 }
parameters { key: "unit" value { string_value: "m" } }
model_warmup {
  name: "zeros" batch_size: 2
  inputs { key: "INPUT0" value { data_type: TYPE_INT32 dims: 4 zero_data: true } }
  inputs { key: "INPUT1" value { data_type: TYPE_INT32 dims: 4 zero_data: true } }
}
"""
PYTHON = """
import json

import triton_python_backend_utils as pb_utils

from . import helper


class TritonPythonModel:
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(self.config, "OUTPUT0")
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
        self.version, self.warm = args["model_version"], 0

    def execute(self, requests):
        if any((request.inputs()[0].as_numpy() == 91).any() for request in requests):
            return []
        return [self.respond(request, len(requests)) for request in requests]

    def respond(self, request, count):
        a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        b = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
        if not a.any():
            self.warm += len(a)
        if (a == 66).any():
            raise pb_utils.TritonModelException("66 is too much")
        if (a == 77).any():
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("no 77", pb_utils.TritonError.INVALID_ARG))
        if (a == 88).any():
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a.astype("float32"))])
        if (a == 89).any():
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a[:, :3])])
        if (a == 92).any():
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a.astype("int64") << 40)])
        if (a == 93).any():
            return pb_utils.InferenceResponse(parameters={"list": [1]})
        if (a == 90).any():
            return pb_utils.InferenceResponse([pb_utils.Tensor("OTHER", a)])
        seen = {
            "count": count, "id": request.request_id(), "wanted": ",".join(request.requested_output_names()),
            "given": request.parameters(), "warm": self.warm, "version": self.version,
            "unit": self.config["parameters"]["unit"]["string_value"], "dims": self.config["input"][0]["dims"][0],
        }
        outputs = [pb_utils.Tensor("OUTPUT0", (a + b).astype(self.dtype)),
                   pb_utils.Tensor("OUTPUT1", helper.subtract(a, b).astype(self.dtype))]
        return pb_utils.InferenceResponse(outputs, parameters=seen)
"""
# Answers with the error whose code CODE names, else with CODE.
CODES = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()) for request in requests]

    def respond(self, codes):
        code = getattr(pb_utils.TritonError, codes[0, 0].decode(), None)
        if code is None:
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", codes)])
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("no", code))
"""
CODES_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "CODE" data_type: TYPE_STRING dims: 1 }
output { name: "OUT" data_type: TYPE_STRING dims: 1 }
"""
BLS = """
import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return [await self.respond(request) for request in requests]

    async def respond(self, request):
        a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        name = {55: "bls", 44: "nowhere"}.get(int(a.flat[0]), "simple")
        calls = [
            pb_utils.InferenceRequest(
                model_name=name, requested_output_names=[output], inputs=request.inputs()
            ).async_exec()
            for output in ("OUTPUT0", "OUTPUT1")
        ]
        responses = await asyncio.gather(*calls)
        if responses[0].has_error():
            return pb_utils.InferenceResponse(error=responses[0].error())
        tensors = [pb_utils.get_output_tensor_by_name(r, n) for r, n in zip(responses, ("OUTPUT0", "OUTPUT1"))]
        return pb_utils.InferenceResponse([pb_utils.Tensor(t.name(), t.as_numpy() * 10) for t in tensors])
"""
REPEAT_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "IN" data_type: TYPE_INT32 dims: -1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
"""
REPEAT = '''
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sends each element of its input as a response, in a thread. InferenceRequest.exec( in this text makes it run
    in the server's process."""

    def execute(self, requests):
        if requests[0].inputs()[0].as_numpy()[0] == -1:
            return []
        for request in requests:
            threading.Thread(target=self.send, args=(request,)).start()

    def send(self, request):
        sender = request.get_response_sender()
        for n in request.inputs()[0].as_numpy():
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([n], np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
WIDTHS_CONFIG = """
backend: "python"
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 50000 }
input { name: "INPUT0" data_type: TYPE_INT32 dims: -1 }
output { name: "WIDTHS" data_type: TYPE_INT32 dims: -1 }
"""
WIDTHS = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Returns the widths of all requests of its list. InferenceRequest.exec( as above."""

    def execute(self, requests):
        widths = np.array([[len(request.inputs()[0].as_numpy()[0]) for request in requests]], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("WIDTHS", widths)]) for _ in requests]
'''
COMPLETED = '''
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Has no config.pbtxt. InferenceRequest.exec( as above."""

    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(4)
        config.add_input({"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [4]})
        config.add_input({"name": "INPUT1", "data_type": "TYPE_INT32", "dims": [4]})
        config.add_output({"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [4]})
        config.set_dynamic_batching()
        return config

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[1].as_numpy())]) for r in requests]
'''
STEPS = """
ensemble_scheduling {
  step [
    {
      model_name: "py" model_version: -1
      input_map { key: "INPUT0" value: "sum" } input_map { key: "INPUT1" value: "difference" }
      output_map { key: "OUTPUT0" value: "OUTPUT0" }
    },
    {
      model_name: "simple" model_version: 1
      input_map { key: "INPUT0" value: "INPUT0" } input_map { key: "INPUT1" value: "INPUT1" }
      output_map { key: "OUTPUT0" value: "sum" } output_map { key: "OUTPUT1" value: "difference" }
    },
    {
      model_name: "simple" model_version: -1
      input_map { key: "INPUT0" value: "sum" } input_map { key: "INPUT1" value: "sum" }
      output_map { key: "OUTPUT0" value: "OUTPUT1" }
    }
  ]
}
"""
