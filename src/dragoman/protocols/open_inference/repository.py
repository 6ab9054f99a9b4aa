"""The model repository over gRPC: its index, and loading and unloading of models."""

from typing import Any

from dragoman.core.calls import Call, Index, IndexEntry, Load, Request, Unload
from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.spec import check_name
from dragoman.formats import oip_messages as m
from dragoman.protocols.open_inference.exchange import exchange
from dragoman.protocols.wire import EngineCall, GrpcRequest, bearer_token


def index(request: GrpcRequest) -> EngineCall[tuple[IndexEntry, ...], bytes]:
    def written(answer: tuple[IndexEntry, ...]) -> Any:
        row = m.RepositoryIndexResponse.ModelIndex
        rows = [row(name=e.name, version=e.version, state=e.state, reason=e.reason) for e in answer]
        return m.RepositoryIndexResponse(models=rows)

    message = m.parsed(m.RepositoryIndexRequest, request.body)
    _check_repository(message)
    return exchange(
        Request(Index(bearer_token(request.metadata), message.ready), deadline_s=request.deadline_s), written
    )


def load(request: GrpcRequest) -> EngineCall[None, bytes]:
    message = m.parsed(m.RepositoryModelLoadRequest, request.body)
    return exchange(
        _asked(Load(bearer_token(request.metadata)), message, request), lambda _: m.RepositoryModelLoadResponse()
    )


def unload(request: GrpcRequest) -> EngineCall[None, bytes]:
    message = m.parsed(m.RepositoryModelUnloadRequest, request.body)
    return exchange(
        _asked(Unload(bearer_token(request.metadata)), message, request), lambda _: m.RepositoryModelUnloadResponse()
    )


def _asked(call: Call[None], message: Any, request: GrpcRequest) -> Request[None]:
    """The request to do `call` with the model and, where a parameter names one, the version of a message."""
    _check_repository(message)
    parameters = m.read_parameters(message.parameters, "")
    for name in parameters:
        if name == "config" or name.startswith("file:"):
            raise NotSupported(
                f"parameter '{name}': models are loaded as they lie in the repository; put the change there and load"
            )
    version = parameters.get("version", "")
    if not isinstance(version, str):
        raise InvalidInput(f"parameter 'version': expected text, got {version!r}")
    if version:
        check_name(version, "version")
    return Request(call, check_name(message.model_name), version, deadline_s=request.deadline_s)


def _check_repository(message: Any) -> None:
    if message.repository_name:
        raise NotSupported(f"there is one repository; expected no repository_name, got '{message.repository_name}'")
