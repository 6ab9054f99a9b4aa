"""Open Inference Protocol over REST: requests with binary tensors, and parsers of the responses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from dragoman.client import errors
from dragoman.client.http import compress
from dragoman.client.messages import (
    Address,
    Compression,
    RemoteCall,
    RemoteStream,
    RestRequest,
    RestResponse,
    labels_of_metadata,
    spec_of_metadata,
)
from dragoman.core.calls import IndexEntry, ModelDescription, ServerDescription
from dragoman.core.errors import InvalidInput, InvalidOutput, ServerError
from dragoman.core.signature import Signature, TensorSpec
from dragoman.formats import fast_json
from dragoman.formats.body import HEADER_LENGTH
from dragoman.formats.json_numbers import PARSER_ERRORS
from dragoman.formats.message import InferenceRequest, InferenceResponse
from dragoman.formats.policy import Buffer

T = TypeVar("T")

_OCTETS = ("content-type", "application/octet-stream")
_JSON = ("content-type", "application/json")


class _Server(msgspec.Struct):
    name: str = ""
    version: str = ""
    extensions: Sequence[str] = ()


class _ResponseTensor(msgspec.Struct):
    name: str
    datatype: str = ""
    shape: Sequence[int] = ()
    parameters: Mapping[str, Any] | None = None

    def spec(self) -> TensorSpec:
        return spec_of_metadata(self.name, self.datatype, self.shape, self.parameters or {})


class _Model(msgspec.Struct):
    name: str
    versions: Sequence[str] | None = None
    platform: str = ""
    parameters: Mapping[str, Any] | None = None
    inputs: Sequence[_ResponseTensor] | None = None
    outputs: Sequence[_ResponseTensor] | None = None


class _Models(msgspec.Struct):
    models: list[str]


class _IndexEntry(msgspec.Struct):
    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class Rest:
    """Builds requests for one server."""

    def __init__(self, address: Address) -> None:
        self._base = f"{address.base}/v2"
        self._headers = address.headers
        self._compression: Compression = address.compression

    def infer(self, model: str, version: str, request: InferenceRequest) -> RemoteCall[InferenceResponse]:
        body, length = request.to_binary()
        headers: tuple[tuple[str, str], ...] = (_OCTETS, (HEADER_LENGTH, str(length)))
        if self._compression:
            body = compress(body, self._compression)
            headers += (("content-encoding", self._compression), ("accept-encoding", self._compression))
        return RemoteCall(self._post(f"{_path(model, version)}/infer", headers, body), _read_infer)

    def stream(self, model: str, version: str, request: InferenceRequest) -> RemoteStream:
        """Responses are JSON, because server-sent events are text."""
        body, length = request.to_binary(binary_output=False)
        headers = (_OCTETS, (HEADER_LENGTH, str(length)), ("accept", "text/event-stream"))
        return RemoteStream(self._post(f"{_path(model, version)}/infer_stream", headers, body), _events)

    def live(self) -> RemoteCall[bool]:
        return RemoteCall(self._get("/health/live"), _is_ok)

    def ready(self, model: str, version: str) -> RemoteCall[bool]:
        return RemoteCall(self._get(f"{_path(model, version)}/ready" if model else "/health/ready"), _is_ok)

    def server(self) -> RemoteCall[ServerDescription]:
        return RemoteCall(self._get(""), _read_server)

    def model(self, model: str, version: str) -> RemoteCall[ModelDescription]:
        return RemoteCall(self._get(_path(model, version)), _read_model)

    def models(self) -> RemoteCall[list[str]]:
        return RemoteCall(self._get("/models"), lambda response: _parse(_Models, response).models)

    def index(self, ready: bool) -> RemoteCall[list[IndexEntry]]:
        return RemoteCall(self._post("/repository/index", (_JSON,), [fast_json.dumps({"ready": ready})]), _read_index)

    def load(self, model: str) -> RemoteCall[None]:
        return RemoteCall(self._post(f"/repository/models/{quote(model, '')}/load", (), []), _check_status)

    def unload(self, model: str) -> RemoteCall[None]:
        return RemoteCall(self._post(f"/repository/models/{quote(model, '')}/unload", (), []), _check_status)

    def _get(self, path: str) -> RestRequest:
        return RestRequest("GET", self._base + path, self._headers)

    def _post(self, path: str, headers: tuple[tuple[str, str], ...], body: Sequence[Any]) -> RestRequest:
        return RestRequest("POST", self._base + path, (*headers, *self._headers), body)


def _path(model: str, version: str) -> str:
    if not model:
        raise InvalidInput("expected the name of a model, got none")
    return f"/models/{quote(model, '')}" + (f"/versions/{quote(version, '')}" if version else "")


# --- reading ---------------------------------------------------------------------------------------------------


def _check_status(response: RestResponse) -> None:
    if not 200 <= response.status < 300:
        raise errors.error_of_status(response.status, response.headers, response.body)


def _is_ok(response: RestResponse) -> bool:
    # Open Inference: 200 is true, 4xx is false; but a wrong token or path says nothing about health.
    if response.status in (400, 503):
        return False
    _check_status(response)
    return True


def _parse(kind: type[T], response: RestResponse) -> T:
    _check_status(response)
    try:
        return msgspec.json.decode(response.body, type=kind)
    except PARSER_ERRORS as error:
        raise InvalidOutput(f"the server's response cannot be read: {error}") from error


def _read_infer(response: RestResponse) -> InferenceResponse:
    _check_status(response)
    return _response(response.body, response.headers.get(HEADER_LENGTH))


def _response(body: Buffer, header_length: str | None) -> InferenceResponse:
    try:
        return InferenceResponse.from_json(body, header_length)
    except InvalidInput as error:
        raise InvalidOutput(f"the server's response cannot be read: {error.message}") from error


def _read_server(response: RestResponse) -> ServerDescription:
    parsed = _parse(_Server, response)
    return ServerDescription(parsed.name, parsed.version, tuple(parsed.extensions))


def _read_model(response: RestResponse) -> ModelDescription:
    parsed = _parse(_Model, response)
    inputs, outputs = (tuple(row.spec() for row in rows or ()) for rows in (parsed.inputs, parsed.outputs))
    labels = labels_of_metadata((row.name, row.parameters or {}) for row in parsed.outputs or ())
    versions = tuple(parsed.versions or ())
    signature = Signature(inputs, outputs, content_type=str((parsed.parameters or {}).get("content_type") or ""))
    return ModelDescription(parsed.name, versions, parsed.platform, signature, labels=labels)


def _read_index(response: RestResponse) -> list[IndexEntry]:
    return [IndexEntry(e.name, e.version, e.state, e.reason) for e in _parse(list[_IndexEntry], response)]


def _events() -> Callable[[Buffer], Iterator[InferenceResponse]]:
    """Return a parser of server-sent events, whose boundaries need not be those of the chunks."""
    rest = b""

    def read(data: Buffer) -> Iterator[InferenceResponse]:
        nonlocal rest
        *events, rest = (rest + bytes(data)).replace(b"\r\n", b"\n").split(b"\n\n")
        for text in map(_data, events):
            if text.startswith(b'{"error"'):
                raise ServerError(fast_json.loads(text)["error"])
            if text and text != b"[DONE]":
                yield _response(text, None)

    return read


def _data(event: bytes) -> bytes:
    return b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
