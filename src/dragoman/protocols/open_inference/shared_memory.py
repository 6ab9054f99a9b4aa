"""The extensions for system and CUDA shared memory: register, status and unregister, over REST and gRPC."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import structs

from dragoman.core.callers import Caller
from dragoman.core.errors import InvalidInput, ModelNotFound, NotSupported
from dragoman.formats import grpc_messages as m
from dragoman.formats.json_numbers import PARSER_ERRORS, describe_parser_error
from dragoman.formats.json_scan import check_json
from dragoman.formats.shared_regions import Region, SharedRegions, require_regions
from dragoman.protocols.open_inference.extensions import authorized_call
from dragoman.protocols.wire import (
    Bodies,
    EngineCall,
    GrpcMethod,
    GrpcRequest,
    HttpRequest,
    HttpResponse,
    Operation,
    Policy,
    Route,
    json_response,
    message_response,
)


class SystemRegion(msgspec.Struct, forbid_unknown_fields=True):
    """A region of system shared memory: `key` is its name in /dev/shm, `offset` and `byte_size` are in bytes."""

    key: str | None = None
    byte_size: int | None = None
    offset: int = 0


class RegionStatus(msgspec.Struct):
    """A registered region."""

    name: str
    key: str
    offset: int
    byte_size: int


_Change = tuple[str, Mapping[str, object]]
_SYSTEM = msgspec.json.Decoder(SystemRegion)
_NO_GPU = "failed to register CUDA shared memory region: '{}', GPUs not supported"


def routes(policy: Policy) -> list[Route]:
    """Return the routes of REST."""

    def register_system(http: HttpRequest) -> EngineCall[None, HttpResponse]:
        regions, name = _regions_of(policy, http.caller), http.params["region"]
        region = _parse_region(http, policy)
        return _after_authorization(http, partial(_register, regions, name, region), _registering(name, region))

    def register_cuda(http: HttpRequest) -> EngineCall[None, HttpResponse]:
        return _after_authorization(http, partial(_register_cuda, policy.regions, http.params["region"]))

    def unregister_system(http: HttpRequest) -> EngineCall[None, HttpResponse]:
        regions, name = _regions_of(policy, http.caller), http.params.get("region", "")
        return _after_authorization(http, partial(_unregister, regions, name), _unregistering(name))

    def unregister_cuda(http: HttpRequest) -> EngineCall[None, HttpResponse]:
        return _after_authorization(http, lambda: require_regions(policy.regions) and None)

    def status_system(http: HttpRequest) -> EngineCall[None, HttpResponse]:
        regions, name = _regions_of(policy, http.caller), http.params.get("region", "")
        return _after_authorization(http, lambda: message_response([*map(_region_status, _status(regions, name))]))

    def status_cuda(http: HttpRequest) -> EngineCall[None, HttpResponse]:
        regions, name = _regions_of(policy, http.caller), http.params.get("region", "")
        return _after_authorization(http, partial(_cuda_regions, regions, name))

    success: Mapping[int, Bodies] = {200: {}}
    listed: Mapping[int, Bodies] = {200: {"application/json": list[RegionStatus]}}
    body = {"application/json": SystemRegion}
    table: list[Route] = []
    for prefix, noun, register, unregister, status in (
        ("/v2/systemsharedmemory", "system", register_system, unregister_system, status_system),
        ("/v2/cudasharedmemory", "CUDA", register_cuda, unregister_cuda, status_cuda),
    ):
        registering = Operation(f"Register a region of {noun} shared memory", success, body)
        unregistering = Operation(f"Unregister regions of {noun} shared memory", success)
        listing = Operation(f"List the regions of {noun} shared memory", listed)
        table += [
            Route("GET", f"{prefix}/status", status, operation=listing),
            Route("GET", f"{prefix}/region/{{region}}/status", status, operation=listing),
            Route("POST", f"{prefix}/region/{{region}}/register", register, operation=registering),
            Route("POST", f"{prefix}/region/{{region}}/unregister", unregister, operation=unregistering),
            Route("POST", f"{prefix}/unregister", unregister, operation=unregistering),
        ]
    return table


def methods(policy: Policy) -> tuple[GrpcMethod, ...]:
    """Return the methods of gRPC."""
    return tuple(GrpcMethod(name, partial(_grpc_call, policy, name, run)) for name, run in _METHODS.items())


def _regions_of(policy: Policy, caller: Caller) -> SharedRegions | None:
    """Return the regions of a caller who may register some."""
    return None if policy.regions is None else policy.regions.of(caller.owner, registers=True)


def _grpc_call(
    policy: Policy, method: str, run: Callable[[SharedRegions | None, Any], Any], request: GrpcRequest
) -> EngineCall[None, bytes]:
    message = m.parse_message(m.message_class(f"{method}Request"), request.body)
    regions = _regions_of(policy, request.caller)

    def respond() -> bytes:
        return bytes(run(regions, message).SerializeToString())

    change = None
    if method == "SystemSharedMemoryRegister":
        change = _registering(message.name, SystemRegion(message.key))
    elif method == "SystemSharedMemoryUnregister":
        change = _unregistering(message.name)
    return authorized_call(request, respond, change=change)


def _system_status(regions: SharedRegions | None, message: Any) -> Any:
    response = m.SystemSharedMemoryStatusResponse()
    for region in _status(regions, message.name):
        status = response.regions[region.name]
        status.name, status.key, status.offset, status.byte_size = structs.astuple(_region_status(region))
    return response


def _system_register(regions: SharedRegions | None, message: Any) -> Any:
    region = SystemRegion(message.key or None, message.byte_size, message.offset)
    _register(regions, message.name, region)
    return m.SystemSharedMemoryRegisterResponse()


def _system_unregister(regions: SharedRegions | None, message: Any) -> Any:
    _unregister(regions, message.name)
    return m.SystemSharedMemoryUnregisterResponse()


def _cuda_status(regions: SharedRegions | None, message: Any) -> Any:
    _check_no_cuda_region(regions, message.name)
    return m.CudaSharedMemoryStatusResponse()


def _cuda_unregister(regions: SharedRegions | None, _message: Any) -> Any:
    require_regions(regions)
    return m.CudaSharedMemoryUnregisterResponse()


_METHODS: Mapping[str, Callable[[SharedRegions | None, Any], Any]] = {
    "SystemSharedMemoryStatus": _system_status,
    "SystemSharedMemoryRegister": _system_register,
    "SystemSharedMemoryUnregister": _system_unregister,
    "CudaSharedMemoryStatus": _cuda_status,
    "CudaSharedMemoryRegister": lambda regions, message: _register_cuda(regions, message.name),
    "CudaSharedMemoryUnregister": _cuda_unregister,
}


def _after_authorization(
    http: HttpRequest, run: Callable[[], Any], change: _Change | None = None
) -> EngineCall[None, HttpResponse]:
    """Return a call that checks the control token, then runs a function: its response, or an empty one."""
    return authorized_call(http, lambda: run() or HttpResponse(200), change=change)


def _registering(name: str, region: SystemRegion) -> _Change:
    return "register shared memory", {"region": name, "memory": region.key}


def _unregistering(name: str) -> _Change:
    return "unregister shared memory", {"region": name or "*"}


def _parse_region(http: HttpRequest, policy: Policy) -> SystemRegion:
    body = bytes(http.body)
    check_json(body, policy)
    try:
        return _SYSTEM.decode(body)
    except PARSER_ERRORS as error:
        raise InvalidInput(f"the request is not valid: {describe_parser_error(error)}") from error


def _register(regions: SharedRegions | None, name: str, region: SystemRegion) -> None:
    found = require_regions(regions)
    if not name:
        raise InvalidInput("'region name' is necessary to register system shared memory region")
    for field in ("key", "byte_size"):
        if getattr(region, field) is None:
            raise InvalidInput(f"Shared memory register request has no '{field}' field")
    found.register(name, region.key or "", region.offset, region.byte_size or 0)


def _register_cuda(regions: SharedRegions | None, name: str) -> None:
    require_regions(regions)
    raise NotSupported(_NO_GPU.format(name))


def _unregister(regions: SharedRegions | None, name: str) -> None:
    require_regions(regions).unregister(name)


def _status(regions: SharedRegions | None, name: str) -> Sequence[Region]:
    return () if regions is None and not name else require_regions(regions).status(name)


def _check_no_cuda_region(regions: SharedRegions | None, name: str) -> None:
    """Raise ModelNotFound: no region is one of CUDA shared memory. Without a name there is nothing to find."""
    if not name:
        return
    if any(region.name == name for region in _status(regions, "")):
        kinds = "registered as system shared memory, not CUDA shared memory"
        raise ModelNotFound(f"The region named '{name}' is {kinds}")
    raise ModelNotFound(f"Unable to find cuda shared memory region: '{name}'")


def _cuda_regions(regions: SharedRegions | None, name: str) -> HttpResponse:
    _check_no_cuda_region(regions, name)
    return json_response([])


def _region_status(region: Region) -> RegionStatus:
    return RegionStatus(region.name, region.key, region.offset, region.byte_size)
