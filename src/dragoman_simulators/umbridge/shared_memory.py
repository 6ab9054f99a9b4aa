"""UM-Bridge with vectors in shared memory, for clients on the same machine, if the operator enables it.

As UM-Bridge's clients implement it, without a specification: a request names POSIX shared memory segments of float64
that the client has created. Only names that begin with `umbridge` are opened.
"""

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dragoman.core.calls import DescribeModels, Infer, Inference, Request, Response
from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import NONE, Tensor
from dragoman.formats.json_scan import check_json
from dragoman.protocols.wire import (
    EndpointResult,
    EngineCall,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    Policy,
    PreliminaryCall,
    Route,
    json_response,
)
from dragoman_simulators.umbridge.routes import (
    VERBS,
    UmBridge,
    derivative_call,
    format_error,
    invalid_request,
    positional_inputs,
)

_FOLDER = Path("/dev/shm")  # noqa: S108 - POSIX shared memory on Linux
_NAME = re.compile(r"/?(umbridge[A-Za-z0-9_-]{0,64})", re.ASCII)
_TID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_BYTES = 8


def protocol(policy: Policy) -> HttpProtocol:
    """Return the routes, which are those of UM-Bridge with `ShMem` appended."""
    endpoints = UmBridge(policy)
    routes = [Route("POST", f"/{verb}ShMem", partial(_call, endpoints, verb), role="infer") for verb in VERBS]
    routes.append(Route("POST", "/TestShMem", partial(_test_segments, policy), role="infer"))
    return HttpProtocol("UM-Bridge, shared memory", tuple(routes), format_error)


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of one call: `name_in_tid_0`, ... and `name_out_tid_0`, ..."""

    name: str
    tid: str
    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, fields: Mapping[str, Any], policy: Policy) -> "Segments":
        """Return the segments of a request. Raises InvalidInput naming the invalid field."""
        name = fields.get("shmem_name")
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise InvalidInput(f"'shmem_name': expected a name that begins with 'umbridge', got {name!r:.100}")
        count = _integer(fields, "shmem_num_inputs", policy.max_tensors)
        sizes = tuple(_integer(fields, f"shmem_size_{i}", policy.max_elements) for i in range(count))
        return cls(match[1], _thread_id(fields), sizes)

    def read_inputs(self) -> list[Array]:
        return [_read(f"{self.name}_in_{self.tid}_{i}", size) for i, size in enumerate(self.sizes)]

    def write_outputs(self, outputs: Sequence[Array]) -> None:
        for i, vector in enumerate(outputs):
            _write(f"{self.name}_out_{self.tid}_{i}", vector)


def _call(endpoints: UmBridge, verb: str, http: HttpRequest) -> EndpointResult:
    message = endpoints.parse(http, tuple(key for key in VERBS[verb][1] if key != "input"), verb)
    if isinstance(message, PreliminaryCall):
        return message
    try:
        segments = Segments.parse(_fields(http, endpoints.policy), endpoints.policy)
        message.input = segments.read_inputs()
    except InvalidInput as error:
        return invalid_request(message.name, verb, error)
    if verb == "Evaluate":
        call = Infer({}, positional=positional_inputs(message), config=message.config or NONE)
        return EngineCall(endpoints.request(call, message, http), partial(_format_evaluation, segments))
    request = endpoints.request(derivative_call(verb, message), message, http)
    return EngineCall(request, partial(_format_derivative, segments))


def _format_evaluation(segments: Segments, response: Response[Inference]) -> HttpResponse:
    segments.write_outputs([tensor.data for tensor in response.answer.outputs.values()])
    return json_response({})


def _format_derivative(segments: Segments, response: Response[Tensor]) -> HttpResponse:
    segments.write_outputs([response.answer.data])
    return json_response({})


def _test_segments(policy: Policy, http: HttpRequest) -> EndpointResult:
    """Copy one number between two segments, by which a client checks that the server sees its segments."""
    tid = _thread_id(_fields(http, policy))

    def format_response(_: object) -> HttpResponse:
        value = _read(f"umbridge_test_shmem_in_{tid}", 1)
        _write(f"umbridge_test_shmem_out_{tid}", value)
        return json_response({"value": float(value[0])})

    return EngineCall(Request(DescribeModels()), format_response)


# --- fields --------------------------------------------------------------------------------------------------


def _fields(http: HttpRequest, policy: Policy) -> dict[str, Any]:
    check_json(bytes(http.body), policy)
    try:
        return msgspec.json.decode(bytes(http.body), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the request is not a JSON object: {error}") from error


def _thread_id(fields: Mapping[str, Any]) -> str:
    """Return the client's thread id, a part of the names of its segments. Raises InvalidInput if it is invalid."""
    tid = fields.get("tid")
    if isinstance(tid, bool) or not isinstance(tid, str | int) or _TID.fullmatch(str(tid)) is None:
        raise InvalidInput(f"'tid': expected letters and digits, got {tid!r:.100}")
    return str(tid)


def _integer(fields: Mapping[str, Any], key: str, most: int) -> int:
    value = fields.get(key)
    if type(value) is not int or not 0 <= value <= most:
        raise InvalidInput(f"'{key}': expected an integer from 0 to {most}, got {value!r:.100}")
    return value


# --- segments --------------------------------------------------------------------------------------------------


def _read(name: str, size: int) -> Array:
    """Return the numbers in a segment; an empty vector has no segment. Raises InvalidInput if it does not exist."""
    if not size:
        return np.zeros(0)
    descriptor = _open(name, os.O_RDONLY, size)
    try:
        array = np.empty(size, np.float64)
        if os.preadv(descriptor, [array.data.cast("B")], 0) != array.nbytes:
            raise InvalidInput(f"segment '{name}' changed while it was read")
        return array
    finally:
        os.close(descriptor)


def _write(name: str, vector: Array) -> None:
    """Write numbers into a segment. Raises InvalidInput if it does not exist or is too small."""
    if not vector.size:
        return
    flat = np.ascontiguousarray(vector, np.float64).reshape(-1)
    descriptor = _open(name, os.O_RDWR, flat.size)
    try:
        os.pwritev(descriptor, [flat.data.cast("B")], 0)
    finally:
        os.close(descriptor)


def _open(name: str, flags: int, size: int) -> int:
    try:
        descriptor = os.open(_FOLDER / name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidInput(f"segment '{name}' cannot be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size < size * _BYTES:
        os.close(descriptor)
        raise InvalidInput(f"segment '{name}': expected {size * _BYTES} bytes for {size} numbers, got {status.st_size}")
    return descriptor
