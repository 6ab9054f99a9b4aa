"""Send the steps of a case to a server, and bring its answers into a form that is equal for equal answers.

Not compared are the order of keys, nulls and empty fields, times, and texts of errors.
"""

import http.client
import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2_grpc

from benchmarks.processes import free_port
from benchmarks.side_by_side.cases import CONTENTS, Case, Http, Pause, Rpc, Step, unpacked

NO_ANSWER = "no answer"
DEADLINE_S = 10.0
# Times, memory, texts of errors in the index, and ids that MLServer makes.
_VARYING = {"ns", "last_inference", "memory_usage", "reason", "Ce-Id", "Ce-Requestid"}


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of a server."""

    http: int
    grpc: int

    @classmethod
    def free(cls) -> "Ports":
        return cls(free_port(), free_port())


def answers(ports: Ports, case: Case, deadline_s: float = DEADLINE_S) -> list[Any]:
    """Return the answers to the steps of a case. A step without an answer in time ends it with `NO_ANSWER`."""
    found = []
    for step in case.steps:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            continue
        found.append(_answer(ports, step, deadline_s))
        if found[-1] == NO_ANSWER:
            break
    return found


def _answer(ports: Ports, step: Step, deadline_s: float) -> Any:
    if isinstance(step, Http):
        return _http_answer(ports.http, step, deadline_s)
    assert isinstance(step, Rpc)
    return _grpc_answer(ports.grpc, step, deadline_s)


def _http_answer(port: int, step: Http, deadline_s: float) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=deadline_s)
    try:
        connection.request(step.method, step.path, step.content, dict(step.headers))
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException):
        return NO_ANSWER
    finally:
        connection.close()
    kind = response.headers.get_content_type() if content else ""
    if response.status >= 400:
        return {"status": response.status, "error": _is_error(content)}
    if kind == "text/event-stream":
        lines = [line.removeprefix("data: ") for line in content.decode().splitlines() if line.startswith("data: ")]
        events = [_without_text(json.loads(line)) for line in lines]
        return {"status": response.status, "events": _normalized(events, step.keeps_id)}
    if length := response.headers.get("inference-header-content-length"):
        body = _with_data(json.loads(content[: int(length)]), content[int(length) :])
        return {"status": response.status, "binary": True, "body": _normalized(body, step.keeps_id)}
    if kind == "application/json" and "docs" not in step.path:
        return {"status": response.status, "body": _normalized(json.loads(content), step.keeps_id)}
    return {"status": response.status, "type": kind}


def _is_error(content: bytes) -> bool:
    """Return whether a body is the error object of the protocol."""
    try:
        body = json.loads(content)
    except ValueError:
        return False
    return isinstance(body, dict) and isinstance(body.get("error"), str) and bool(body["error"])


def _without_text(event: Any) -> Any:
    return {"error": True} if isinstance(event, dict) and "error" in event else event


def _with_data(body: dict[str, Any], raw: bytes) -> dict[str, Any]:
    """Return a response with the data of its binary part."""
    at = 0
    for output in body.get("outputs", ()):
        size = output.get("parameters", {}).get("binary_data_size")
        if size is not None:
            output["data"] = unpacked(output["datatype"], raw[at : at + size])
            at += size
    return body if at == len(raw) else {**body, "bytes without an output": len(raw) - at}


def _grpc_answer(port: int, step: Rpc, deadline_s: float) -> Any:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), step.method)
        options: dict[str, Any] = {"timeout": deadline_s, "metadata": tuple(step.headers.items())}
        responses: list[Any] = []
        try:
            if step.method == "ModelStreamInfer":
                for response in call(iter(step.messages), **options):
                    responses += [_stream_response(response, step.keeps_id)]
                return {"code": "OK", "responses": responses}
            return {"code": "OK", "body": _message(call(step.messages[0], **options), step.keeps_id)}
        except grpc.RpcError as error:
            code = error.code().name
            if code in ("DEADLINE_EXCEEDED", "UNAVAILABLE") and not responses and _is_lost(error):
                return NO_ANSWER
            return {"code": code, **({"responses": responses} if responses else {})}


def _is_lost(error: Any) -> bool:
    """Return whether a status is that of the client's own library: the deadline, or a closed connection."""
    return bool(re.search(r"Deadline Exceeded|failed to connect|Socket closed|Connection re|recvmsg", error.details()))


def _stream_response(response: Any, keeps_id: bool) -> Any:
    if response.error_message:
        parameters = _values(response.infer_response.parameters)
        return {"error": True, **({"parameters": parameters} if parameters else {})}
    return _message(response.infer_response, keeps_id)


def _message(message: Any, keeps_id: bool) -> Any:
    if message.DESCRIPTOR.name != "ModelInferResponse":
        return _normalized(MessageToDict(message, preserving_proto_field_name=True), keeps_id)
    outputs = [_output(tensor, message, at) for at, tensor in enumerate(message.outputs)]
    fields = {"model_name": message.model_name, "model_version": message.model_version, "id": message.id}
    body = {**fields, "parameters": _values(message.parameters), "outputs": outputs}
    return _normalized(body, keeps_id)


def _values(parameters: Any) -> dict[str, Any]:
    return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}


def _output(tensor: Any, response: Any, at: int) -> dict[str, Any]:
    if response.raw_output_contents:
        values = unpacked(tensor.datatype, response.raw_output_contents[at])
    else:
        contents = getattr(tensor.contents, CONTENTS[tensor.datatype])
        values = [each.decode("latin-1") if isinstance(each, bytes) else each for each in contents]
    shape, parameters = list(tensor.shape), _values(tensor.parameters)
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "parameters": parameters, "data": values}


def _normalized(value: Any, keeps_id: bool) -> Any:
    """Return a response without nulls, empty fields and times, and FP32 rounded to FP32."""
    if isinstance(value, dict):
        found = {
            name: _normalized(each, keeps_id)
            for name, each in value.items()
            if name not in _VARYING and (each not in (None, {}, [], "") or name == "data")
        }
        if found.get("datatype") == "FP32" and isinstance(found.get("data"), list):
            found["data"] = [_as_fp32(each) for each in found["data"]]
        if "model_name" in found and not keeps_id:
            found.pop("id", None)
        if "extensions" in found:
            found.pop("version", None)  # of the server
        return found
    if isinstance(value, list):
        return [_normalized(each, keeps_id) for each in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _as_fp32(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else float(np.float32(value))


# --- differences ---------------------------------------------------------------------------------------------------


def difference(theirs: Any, ours: Any) -> tuple[Any, Any]:
    """Return the parts of two answers that differ: the fields of objects, and the elements of lists of one length."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        names = [name for name in {**theirs, **ours} if theirs.get(name, ...) != ours.get(name, ...)]
        parts = {name: difference(theirs.get(name, "(none)"), ours.get(name, "(none)")) for name in names}
        return {name: part[0] for name, part in parts.items()}, {name: part[1] for name, part in parts.items()}
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours) <= 40:
        pairs = [(at, difference(a, b)) for at, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b]
        return {str(at): part[0] for at, part in pairs}, {str(at): part[1] for at, part in pairs}
    return theirs, ours


def shown(part: Any) -> str:
    """Return a part of an answer as text of at most 300 characters."""
    text = json.dumps(part, sort_keys=True, ensure_ascii=False, default=str)
    return text if len(text) <= 300 else text[:297] + "..."
