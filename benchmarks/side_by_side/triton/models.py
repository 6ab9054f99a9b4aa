"""Write a model repository of Triton: models of the Python backend and an ensemble."""

from pathlib import Path

# Datatypes of the Python backend, in the order of the tensors of the model `types`.
DATATYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES"),
)
# All models but `broken`, which cannot be loaded.
NAMES = (
    *("types", "batch", "free", "matrix", "lazy", "counted", "versions", "sleep", "queued", "bls", "report", "addsub"),
    *("optional", "reshaped", "raises", "decoupled", "direct", "oldest", "short", "named", "idle", "ensemble"),
)
_HEAD = """
import asyncio
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def array(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def text(request, name="TEXT"):
    return array(request, name).reshape(-1)[0].decode()


def response(**arrays):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in arrays.items()])


def words(*values):
    return np.array([value.encode() for value in values], dtype=np.object_)


class TritonPythonModel:
"""
_IDENTITY = """
    def execute(self, requests):
        return [response(Y=array(request, "X")) for request in requests]
"""
_TYPES = """
    def execute(self, requests):
        found = []
        for request in requests:
            names = [tensor.name() for tensor in request.inputs()]
            found.append(response(**{"Y" + name[1:]: array(request, name) for name in names}))
        return found
"""
_ADD_SUB = """
    def execute(self, requests):
        found = []
        for request in requests:
            a, b = array(request, "A"), array(request, "B")
            asked = request.requested_output_names()
            values = {"SUM": a + b, "DIFFERENCE": a - b}
            found.append(response(**{name: values[name] for name in values if name in asked}))
        return found
"""
_OPTIONAL = """
    def execute(self, requests):
        found = []
        for request in requests:
            x, scale = array(request, "X"), array(request, "SCALE")
            found.append(response(Y=x * (10 if scale is None else scale)))
        return found
"""
_REPORT = """
    def execute(self, requests):
        found = []
        for request in requests:
            facts = {
                "parameters": json.loads(request.parameters()),
                "id": request.request_id(),
                "timeout": request.timeout(),
                "correlation": request.correlation_id(),
                "flags": request.flags(),
                "outputs": sorted(request.requested_output_names()),
            }
            found.append(response(Y=words(json.dumps(facts, sort_keys=True))))
        return found
"""
_RAISES = """
    def execute(self, requests):
        found = []
        for request in requests:
            kind = text(request)
            if kind == "exception":
                raise ValueError("no")
            if kind == "exit":
                raise SystemExit(3)
            if kind == "cancelled":
                raise asyncio.CancelledError
            if kind == "interrupt":
                raise KeyboardInterrupt
            if kind == "generator":
                raise GeneratorExit
            if kind == "base":
                raise BaseException("no")
            if kind == "empty message":
                raise RuntimeError
            if kind == "stop":
                raise StopIteration
            if kind == "model exception":
                raise pb_utils.TritonModelException("no")
            if kind == "none":
                return None
            if kind == "number":
                return 7
            if kind == "element none":
                found.append(None)
            elif kind == "element text":
                found.append("text")
            elif kind == "too many":
                found += [response(Y=words("a")), response(Y=words("b"))]
            elif kind == "too few":
                continue
            elif kind == "error":
                found.append(pb_utils.InferenceResponse([], pb_utils.TritonError("no")))
            elif kind.startswith("code "):
                code = getattr(pb_utils.TritonError, kind.removeprefix("code "))
                found.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("no", code)))
            elif kind == "wrong datatype":
                found.append(response(Y=np.array([1], np.int32)))
            elif kind == "wrong shape":
                found.append(response(Y=words("a", "b")))
            elif kind == "wrong name":
                found.append(response(Z=words("a")))
            elif kind == "no output":
                found.append(pb_utils.InferenceResponse([]))
            else:
                found.append(response(Y=words(kind)))
        return found
"""
_DECOUPLED = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            for step in json.loads(text(request)):
                if step == "error":
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("half")))
                elif step == "final error":
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("half")), flags=final)
                elif step == "final":
                    sender.send(flags=final)
                elif step == "raise":
                    raise ValueError("no")
                elif isinstance(step, list):
                    sender.send(response(Y=np.array(step, np.int32)), flags=final)
                else:
                    sender.send(response(Y=np.array([step], np.int32)))
        return None
"""
_SEQUENCE = """
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        found = []
        for request in requests:
            identity = array(request, "CORRID").reshape(-1)[0]
            key = identity.decode() if isinstance(identity, bytes) else int(identity)
            start, end = (bool(array(request, name).reshape(-1)[0]) for name in ("START", "END"))
            if start:
                self.sums[key] = 0
            self.sums[key] = self.sums.get(key, -1000) + int(array(request, "X").reshape(-1)[0])
            facts = {"id": key, "start": start, "end": end, "sum": self.sums[key]}
            if end:
                del self.sums[key]
            found.append(response(Y=words(json.dumps(facts, sort_keys=True)).reshape(SHAPE)))
        return found
"""
_SLEEP = """
    def execute(self, requests):
        time.sleep(0.1)
        return [response(Y=array(request, "X")) for request in requests]
"""
_BLS = """
    def execute(self, requests):
        found = []
        for request in requests:
            x = pb_utils.Tensor("X", array(request, "X"))
            call = pb_utils.InferenceRequest(model_name="free", requested_output_names=["Y"], inputs=[x])
            answer = call.exec()
            if answer.has_error():
                found.append(pb_utils.InferenceResponse(error=answer.error()))
            else:
                found.append(response(Y=pb_utils.get_output_tensor_by_name(answer, "Y").as_numpy() * 2))
        return found
"""
_BROKEN = """
    def initialize(self, args):
        raise ValueError("no weights")

    def execute(self, requests):
        return []
"""
_CPU = "instance_group [{ kind: KIND_CPU }]\n"


def _tensors(field: str, *tensors: tuple[str, str, str]) -> str:
    """Return tensors of a configuration; each is name, datatype and the rest, such as `dims: 2`."""
    types = {"BYTES": "STRING"}
    return "".join(
        f'{field} {{ name: "{name}" data_type: TYPE_{types.get(kind, kind)} {rest} }}\n' for name, kind, rest in tensors
    )


def _write(folder: Path, name: str, code: str, config: str, versions: tuple[int, ...] = (1,)) -> None:
    for version in versions:
        file = folder / name / str(version) / "model.py"
        file.parent.mkdir(parents=True)
        file.write_text(_HEAD + code)
    (folder / name / "config.pbtxt").write_text(f'backend: "python"\n{_CPU}{config}')


def _sequence_config(strategy: str, corrid: str, idle_us: int = 60_000_000) -> str:
    def control(name: str, kind: str, values: str) -> str:
        return f'control_input {{ name: "{name}" control {{ kind: {kind} {values} }} }}\n'

    flags = "int32_false_true: [ 0, 1 ]"
    return (
        f"sequence_batching {{ max_sequence_idle_microseconds: {idle_us}\n{strategy}\n"
        + control("START", "CONTROL_SEQUENCE_START", flags)
        + control("END", "CONTROL_SEQUENCE_END", flags)
        + control("CORRID", "CONTROL_SEQUENCE_CORRID", f"data_type: TYPE_{corrid}")
        + "}\n"
    )


def write_models(folder: Path) -> None:
    """Write the models."""
    x, y = ("X", "FP32", "dims: 2"), ("Y", "FP32", "dims: 2")
    inputs = _tensors("input", *((f"X_{kind}", kind, "dims: -1 optional: true") for kind in DATATYPES))
    outputs = _tensors("output", *((f"Y_{kind}", kind, "dims: -1") for kind in DATATYPES))
    _write(folder, "types", _TYPES, inputs + outputs)
    pair = _tensors("input", x) + _tensors("output", y)
    free = _tensors("input", ("X", "FP32", "dims: -1")) + _tensors("output", ("Y", "FP32", "dims: -1"))
    matrix = _tensors("input", ("X", "INT32", "dims: [ -1, 2 ]")) + _tensors(
        "output", ("Y", "INT32", "dims: [ -1, 2 ]")
    )
    _write(folder, "batch", _IDENTITY, "max_batch_size: 4\ndynamic_batching { }\n" + pair)
    _write(folder, "free", _IDENTITY, free)
    _write(folder, "matrix", _IDENTITY, matrix)
    _write(folder, "lazy", _IDENTITY, free)
    _write(folder, "counted", _IDENTITY, "max_batch_size: 4\n" + pair)
    _write(folder, "versions", _IDENTITY, "version_policy { specific { versions: [ 1, 3 ] } }\n" + free, (1, 2, 3))
    _write(folder, "sleep", _SLEEP, "max_batch_size: 4\n" + pair)
    policy = (
        "default_queue_policy { allow_timeout_override: true default_timeout_microseconds: 5000000 max_queue_size: 8 }"
    )
    levels = "priority_levels: 2 default_priority_level: 1"
    _write(folder, "queued", _IDENTITY, f"max_batch_size: 4\ndynamic_batching {{ {policy} {levels} }}\n{pair}")
    _write(folder, "broken", _BROKEN, free)
    _write(folder, "bls", _BLS, free)
    _write(folder, "report", _REPORT, _tensors("input", x) + _tensors("output", ("Y", "STRING", "dims: 1")))
    _write(
        folder,
        "addsub",
        _ADD_SUB,
        "max_batch_size: 8\n"
        + _tensors("input", ("A", "INT32", "dims: 4"), ("B", "INT32", "dims: 4"))
        + _tensors(
            "output", ("SUM", "INT32", 'dims: 4 label_filename: "labels.txt"'), ("DIFFERENCE", "INT32", "dims: 4")
        ),
    )
    (folder / "addsub" / "labels.txt").write_text("zero\none\ntwo\nthree\n")
    _write(
        folder,
        "optional",
        _OPTIONAL,
        _tensors("input", x, ("SCALE", "FP32", "dims: 2 optional: true")) + _tensors("output", y),
    )
    _write(
        folder,
        "reshaped",
        _IDENTITY,
        "max_batch_size: 4\n"
        + _tensors("input", ("X", "FP32", "dims: 1 reshape { shape: [ ] }"))
        + _tensors("output", ("Y", "FP32", "dims: 1 reshape { shape: [ ] }")),
    )
    text = _tensors("input", ("TEXT", "STRING", "dims: 1"))
    _write(folder, "raises", _RAISES, text + _tensors("output", ("Y", "STRING", "dims: 1")))
    _write(
        folder,
        "decoupled",
        _DECOUPLED,
        "model_transaction_policy { decoupled: true }\n" + text + _tensors("output", ("Y", "INT32", "dims: 1")),
    )
    _write_sequences(folder)
    _write_ensemble(folder)


def _write_sequences(folder: Path) -> None:
    batched = _tensors("input", ("X", "INT32", "dims: 1")) + _tensors("output", ("Y", "STRING", "dims: 1"))
    direct, oldest = "direct { }", "oldest { max_candidate_sequences: 4 }"
    for name, strategy, corrid, size, idle_us in (
        ("direct", direct, "UINT64", 0, 60_000_000),
        ("oldest", oldest, "UINT64", 4, 60_000_000),
        ("short", direct, "UINT32", 0, 60_000_000),
        ("named", direct, "STRING", 0, 60_000_000),
        ("idle", direct, "UINT64", 0, 500_000),
    ):
        code = _SEQUENCE.replace("SHAPE", "(1, 1)" if size else "(1,)")
        config = f"max_batch_size: {size}\n" + batched + _sequence_config(strategy, corrid, idle_us)
        _write(folder, name, code, config)


def _write_ensemble(folder: Path) -> None:
    home = folder / "ensemble"
    (home / "1").mkdir(parents=True)
    steps = (
        'step { model_name: "addsub" model_version: -1 input_map { key: "A" value: "A" }\n'
        'input_map { key: "B" value: "B" } '
        'output_map { key: "SUM" value: "between" } output_map { key: "DIFFERENCE" value: "D" } }\n'
        'step { model_name: "addsub" model_version: -1 input_map { key: "A" value: "between" } '
        'input_map { key: "B" value: "B" }\noutput_map { key: "SUM" value: "S" } }\n'
    )
    (home / "config.pbtxt").write_text(
        'platform: "ensemble"\nmax_batch_size: 8\n'
        + _tensors("input", ("A", "INT32", "dims: 4"), ("B", "INT32", "dims: 4"))
        + _tensors("output", ("S", "INT32", "dims: 4"), ("D", "INT32", "dims: 4"))
        + f"ensemble_scheduling {{ {steps} }}\n"
    )
