"""The protocol over REST: each call as one question with binary tensors, and what its answer says."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import orjson

from dragoman.client import faults
from dragoman.client.address import Address, Compression
from dragoman.client.exchange import Exchange, HttpAnswer, HttpQuestion, StreamExchange
from dragoman.client.http1 import packed
from dragoman.core.calls import IndexEntry, ModelDescription, ServerDescription
from dragoman.core.datatypes import DATATYPES
from dragoman.core.errors import InvalidInput, InvalidOutput, ServerError
from dragoman.core.signature import Signature, TensorSpec
from dragoman.formats.body import HEADER_LENGTH
from dragoman.formats.json_data import PARSER_FAULTS
from dragoman.formats.message import InferenceRequest, InferenceResponse
from dragoman.formats.policy import Buffer

T = TypeVar("T")

_OCTETS = ("content-type", "application/octet-stream")
_JSON = ("content-type", "application/json")


class _Server(msgspec.Struct):
    name: str = ""
    version: str = ""
    extensions: Sequence[str] = ()


class _Tensor(msgspec.Struct):
    name: str
    datatype: str = ""
    shape: Sequence[int] = ()
    parameters: Mapping[str, Any] | None = None

    @property
    def known_shape(self) -> tuple[int, ...] | None:
        """The shape; None if any rank fits, of which only our own server tells."""
        return None if (self.parameters or {}).get("any_rank") is True else tuple(self.shape)


class _Model(msgspec.Struct):
    name: str
    versions: Sequence[str] | None = None
    platform: str = ""
    inputs: Sequence[_Tensor] | None = None
    outputs: Sequence[_Tensor] | None = None


class _Models(msgspec.Struct):
    models: list[str]


class _Entry(msgspec.Struct):
    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class Rest:
    """Writes questions for one server."""

    def __init__(self, address: Address) -> None:
        self._base = f"{address.base}/v2"
        self._headers = address.headers
        self._compression: Compression = address.compression

    def infer(self, model: str, version: str, request: InferenceRequest) -> Exchange[InferenceResponse]:
        body, length = request.to_binary()
        headers: tuple[tuple[str, str], ...] = (_OCTETS, (HEADER_LENGTH, str(length)))
        if self._compression:
            body = packed(body, self._compression)
            headers += (("content-encoding", self._compression), ("accept-encoding", self._compression))
        return Exchange(self._post(f"{_path(model, version)}/infer", headers, body), _read_infer)

    def stream(self, model: str, version: str, request: InferenceRequest) -> StreamExchange:
        """Answers come as JSON: events are text."""
        body, length = request.to_binary(binary_output=False)
        headers = (_OCTETS, (HEADER_LENGTH, str(length)), ("accept", "text/event-stream"))
        return StreamExchange(self._post(f"{_path(model, version)}/infer_stream", headers, body), _events)

    def live(self) -> Exchange[bool]:
        return Exchange(self._get("/health/live"), _is_ok)

    def ready(self, model: str, version: str) -> Exchange[bool]:
        return Exchange(self._get(f"{_path(model, version)}/ready" if model else "/health/ready"), _is_ok)

    def server(self) -> Exchange[ServerDescription]:
        return Exchange(self._get(""), _read_server)

    def model(self, model: str, version: str) -> Exchange[ModelDescription]:
        return Exchange(self._get(_path(model, version)), _read_model)

    def models(self) -> Exchange[list[str]]:
        return Exchange(self._get("/models"), lambda answer: _parsed(_Models, answer).models)

    def index(self, ready: bool) -> Exchange[list[IndexEntry]]:
        return Exchange(self._post("/repository/index", (_JSON,), [orjson.dumps({"ready": ready})]), _read_index)

    def load(self, model: str) -> Exchange[None]:
        return Exchange(self._post(f"/repository/models/{quote(model, '')}/load", (), []), _checked)

    def unload(self, model: str) -> Exchange[None]:
        return Exchange(self._post(f"/repository/models/{quote(model, '')}/unload", (), []), _checked)

    def _get(self, path: str) -> HttpQuestion:
        return HttpQuestion("GET", self._base + path, self._headers)

    def _post(self, path: str, headers: tuple[tuple[str, str], ...], body: Sequence[Any]) -> HttpQuestion:
        return HttpQuestion("POST", self._base + path, (*headers, *self._headers), body)


def _path(model: str, version: str) -> str:
    if not model:
        raise InvalidInput("expected the name of a model, got none")
    return f"/models/{quote(model, '')}" + (f"/versions/{quote(version, '')}" if version else "")


# --- reading ---------------------------------------------------------------------------------------------------


def _checked(answer: HttpAnswer) -> None:
    if not 200 <= answer.status < 300:
        raise faults.of_status(answer.status, answer.headers, answer.body)


def _is_ok(answer: HttpAnswer) -> bool:
    # OIP: 200 is true, 4xx is false; but a token or a path that is wrong is no word about health.
    if answer.status in (400, 503):
        return False
    _checked(answer)
    return True


def _parsed(kind: type[T], answer: HttpAnswer) -> T:
    _checked(answer)
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except PARSER_FAULTS as fault:
        raise InvalidOutput(f"the server's answer cannot be read: {fault}") from fault


def _read_infer(answer: HttpAnswer) -> InferenceResponse:
    _checked(answer)
    return _response(answer.body, answer.headers.get(HEADER_LENGTH))


def _response(body: Buffer, header_length: str | None) -> InferenceResponse:
    try:
        return InferenceResponse.from_json(body, header_length)
    except InvalidInput as fault:
        raise InvalidOutput(f"the server's answer cannot be read: {fault.message}") from fault


def _read_server(answer: HttpAnswer) -> ServerDescription:
    found = _parsed(_Server, answer)
    return ServerDescription(found.name, found.version, tuple(found.extensions))


def _read_model(answer: HttpAnswer) -> ModelDescription:
    found = _parsed(_Model, answer)
    signature = Signature(_specs(found.inputs), _specs(found.outputs))
    return ModelDescription(found.name, tuple(found.versions or ()), found.platform, signature)


def _specs(rows: Sequence[_Tensor] | None) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(r.name, DATATYPES.get(r.datatype), r.known_shape) for r in rows or ())


def _read_index(answer: HttpAnswer) -> list[IndexEntry]:
    return [IndexEntry(e.name, e.version, e.state, e.reason) for e in _parsed(list[_Entry], answer)]


def _events() -> Callable[[Buffer], Iterator[InferenceResponse]]:
    """Reads server-sent events, in whatever pieces they come."""
    rest = b""

    def read(data: Buffer) -> Iterator[InferenceResponse]:
        nonlocal rest
        *events, rest = (rest + bytes(data)).replace(b"\r\n", b"\n").split(b"\n\n")
        for text in map(_data, events):
            if text.startswith(b'{"error"'):
                raise ServerError(orjson.loads(text)["error"])
            if text and text != b"[DONE]":
                yield _response(text, None)

    return read


def _data(event: bytes) -> bytes:
    return b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
