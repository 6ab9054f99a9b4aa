"""UM-Bridge's vectors in shared memory, for clients on the same machine: routes that an operator has to enable.

They are in no document, only in the clients: a call names POSIX segments, of float64, that the client has made. Their
names come from the client, so only those are opened that begin as the clients' do.
"""

import os
import re
import stat
from collections.abc import Sequence
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
from dragoman.formats.umbridge import UmBridgeRequest
from dragoman.protocols.umbridge.routes import VERBS, UmBridge, derivative_call, positional, refusal, write_error
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

_FOLDER = Path("/dev/shm")  # noqa: S108 - where Linux has them
_NAME = re.compile(r"/?(umbridge[A-Za-z0-9_-]{0,64})", re.ASCII)
_TID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_BYTES = 8


def protocol(policy: Policy) -> HttpProtocol:
    """The table of routes, which ask the same as those without shared memory."""
    at = UmBridge(policy)
    routes = [Route("POST", f"/{verb}ShMem", partial(_verb, at, verb)) for verb in VERBS]
    routes.append(Route("POST", "/TestShMem", partial(_test, policy)))
    return HttpProtocol("UM-Bridge, shared memory", tuple(routes), write_error)


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of one call: `name_in_tid_0`, ... and `name_out_tid_0`, ..."""

    name: str
    tid: str
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, given: Any, policy: Policy) -> "Segments":
        """What a request tells of them. Raises InvalidInput naming the field that is wrong."""
        name = _NAME.fullmatch(given.get("shmem_name") if isinstance(given.get("shmem_name"), str) else "")
        if name is None:
            raise InvalidInput(
                f"'shmem_name': expected a name that begins with 'umbridge', got {given.get('shmem_name')!r:.100}"
            )
        count = _integer(given, "shmem_num_inputs", policy.max_tensors)
        sizes = tuple(_integer(given, f"shmem_size_{i}", policy.max_elements) for i in range(count))
        return cls(name[1], tid_of(given), sizes)

    def inputs(self) -> list[Array]:
        return [read(f"{self.name}_in_{self.tid}_{i}", size) for i, size in enumerate(self.sizes)]

    def answer(self, outputs: Sequence[Array]) -> None:
        for i, vector in enumerate(outputs):
            write(f"{self.name}_out_{self.tid}_{i}", vector)


def _verb(at: UmBridge, verb: str, http: HttpRequest) -> EndpointResult:
    question = at.question(http, tuple(key for key in VERBS[verb][1] if key != "input"), verb)
    if isinstance(question, PreliminaryCall):
        return question
    try:
        segments = Segments.of(_fields(http, at.policy), at.policy)
        question.input = segments.inputs()
    except InvalidInput as fault:
        return refusal(question.name, verb, fault)
    if verb == "Evaluate":
        return EngineCall(at.request(_evaluation(question), question, http), partial(_evaluated, segments))
    return EngineCall(at.request(derivative_call(verb, question), question, http), partial(_derived, segments))


def _evaluation(question: UmBridgeRequest) -> Infer:
    return Infer({}, positional=positional(question), config=question.config or NONE)


def _evaluated(segments: Segments, response: Response[Inference]) -> HttpResponse:
    segments.answer([tensor.data for tensor in response.answer.outputs.values()])
    return json_response({})


def _derived(segments: Segments, response: Response[Tensor]) -> HttpResponse:
    segments.answer([response.answer.data])
    return json_response({})


def _test(policy: Policy, http: HttpRequest) -> EndpointResult:
    """Whether client and server see the same segments: one number goes from one to the other."""
    tid = tid_of(_fields(http, policy))

    def reply(_: object) -> HttpResponse:
        value = read(f"umbridge_test_shmem_in_{tid}", 1)
        write(f"umbridge_test_shmem_out_{tid}", value)
        return json_response({"value": float(value[0])})

    return EngineCall(Request(DescribeModels()), reply)


# --- fields --------------------------------------------------------------------------------------------------


def _fields(http: HttpRequest, policy: Policy) -> Any:
    check_json(bytes(http.body), policy)
    try:
        return msgspec.json.decode(bytes(http.body), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise InvalidInput(f"the request is not a JSON object: {fault}") from fault


def tid_of(given: Any) -> str:
    """What tells the segments of one client's thread from others. Raises InvalidInput where it cannot be in a name."""
    tid = given.get("tid")
    if isinstance(tid, bool) or not isinstance(tid, str | int) or _TID.fullmatch(str(tid)) is None:
        raise InvalidInput(f"'tid': expected letters and digits, got {tid!r:.100}")
    return str(tid)


def _integer(given: Any, key: str, most: int) -> int:
    value = given.get(key)
    if type(value) is not int or not 0 <= value <= most:
        raise InvalidInput(f"'{key}': expected an integer from 0 to {most}, got {value!r:.100}")
    return value


# --- segments --------------------------------------------------------------------------------------------------


def read(name: str, size: int) -> Array:
    """The numbers in a segment; an empty vector has none. Raises InvalidInput where there is no such segment."""
    if not size:
        return np.zeros(0)
    descriptor = _opened(name, os.O_RDONLY, size)
    try:
        array = np.empty(size, np.float64)
        if os.preadv(descriptor, [array.data.cast("B")], 0) != array.nbytes:
            raise InvalidInput(f"segment '{name}' changed while it was read")
        return array
    finally:
        os.close(descriptor)


def write(name: str, vector: Array) -> None:
    """Put the numbers into a segment that has room for them, else InvalidInput."""
    if not vector.size:
        return
    flat = np.ascontiguousarray(vector, np.float64).reshape(-1)
    descriptor = _opened(name, os.O_RDWR, flat.size)
    try:
        os.pwritev(descriptor, [flat.data.cast("B")], 0)
    finally:
        os.close(descriptor)


def _opened(name: str, flags: int, size: int) -> int:
    try:
        descriptor = os.open(_FOLDER / name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as fault:
        raise InvalidInput(f"segment '{name}' cannot be opened: {fault.strerror}") from fault
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size < size * _BYTES:
        os.close(descriptor)
        raise InvalidInput(f"segment '{name}': expected {size * _BYTES} bytes for {size} numbers, got {found.st_size}")
    return descriptor
