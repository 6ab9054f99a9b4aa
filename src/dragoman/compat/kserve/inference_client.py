"""KServe's clients over REST and gRPC: for transformers, and for scripts that run where KServe is not installed."""

import asyncio
import os
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Self
from urllib.parse import quote

import orjson

from dragoman.client.errors import ServerUnreachable
from dragoman.client.http_async import connect_transport
from dragoman.client.messages import Address, Deadline, RestRequest, RestResponse, address
from dragoman.compat.kserve.errors import InferenceError, UnsupportedProtocol
from dragoman.compat.kserve.infer_type import InferRequest, InferResponse
from dragoman.compat.kserve.predictor_config import PredictorProtocol
from dragoman.core.errors import DragomanError
from dragoman.formats.oip_messages import (
    ModelInferResponse,
    ModelReadyRequest,
    ModelReadyResponse,
    ServerLiveRequest,
    ServerLiveResponse,
    ServerReadyRequest,
    ServerReadyResponse,
)

_LENGTH = "inference-header-content-length"
_SERVICE = "/inference.GRPCInferenceService/"
_RETRY_DELAY_S = 0.1


class RESTConfig:
    """Settings of the REST client: protocol, number of retries of failed connections, timeout in seconds, TLS."""

    def __init__(
        self,
        transport: Any = None,
        protocol: str | PredictorProtocol = "v1",
        retries: int = 3,
        http2: bool = False,
        timeout: float | None = 60,
        cert: Any = None,
        verify: str | bool = True,
        auth: Any = None,
        verbose: bool = False,
    ) -> None:
        given = {"transport": transport, "http2": http2, "cert": cert, "auth": auth}
        unsupported = [name for name, value in given.items() if value]
        if unsupported:
            raise NotImplementedError(f"RESTConfig: not supported without the package kserve: {unsupported[0]}")
        self.protocol = str(protocol.value if isinstance(protocol, PredictorProtocol) else protocol).lower()
        self.retries, self.timeout, self.verify, self.verbose = retries, timeout, verify, verbose


class InferenceRESTClient:
    """Client of the V1 or V2 protocol over HTTP. It belongs to the event loop that first uses it."""

    def __init__(self, config: RESTConfig | None = None) -> None:
        self._config = config or RESTConfig()
        self._transports: dict[Address, Any] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close idle connections."""
        for transport in self._transports.values():
            await transport.close()

    async def infer(
        self,
        base_url: str,
        data: InferRequest | Mapping[str, Any],
        model_name: str | None = None,
        headers: Mapping[str, str] | None = None,
        response_headers: MutableMapping[str, str] | None = None,
        is_graph_endpoint: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Return the response: an InferResponse, or a JSON value of V1 and of graphs. Raises InferenceError."""
        path = ""
        if not is_graph_endpoint:
            if model_name is None:
                raise ValueError("model_name should not be 'None'")
            name, is_v1 = quote(model_name, safe=""), self._is_v1()
            path = f"/v1/models/{name}:predict" if is_v1 else f"/v2/models/{name}/infer"
        response = await self._send("POST", base_url, path, _body(data), headers, timeout)
        if response_headers is not None:
            response_headers.update(response.headers)
        if is_graph_endpoint or self._is_v1():
            return orjson.loads(response.body)
        body = bytes(response.body)
        return InferResponse.from_bytes(body, int(response.headers.get(_LENGTH, len(body))))

    async def explain(
        self,
        base_url: str,
        model_name: str,
        data: Any,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return the explanation of a model of the V1 protocol. Raises UnsupportedProtocol and InferenceError."""
        if not self._is_v1():
            raise UnsupportedProtocol(self._config.protocol)
        path = f"/v1/models/{quote(model_name, safe='')}:explain"
        return orjson.loads((await self._send("POST", base_url, path, _body(data), headers, timeout)).body)

    async def is_server_ready(
        self, base_url: str, headers: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> bool:
        """Return whether a server of the V2 protocol is ready."""
        if self._is_v1():
            raise UnsupportedProtocol(self._config.protocol)
        return await self._is_success(base_url, "/v2/health/ready", headers, timeout)

    async def is_server_live(
        self, base_url: str, headers: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> bool:
        """Return whether a server is live."""
        return await self._is_success(base_url, "/" if self._is_v1() else "/v2/health/live", headers, timeout)

    async def is_model_ready(
        self,
        base_url: str,
        model_name: str,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Return whether a model is ready."""
        name = quote(model_name, safe="")
        path = f"/v1/models/{name}" if self._is_v1() else f"/v2/models/{name}/ready"
        return await self._is_success(base_url, path, headers, timeout)

    def _is_v1(self) -> bool:
        if self._config.protocol not in ("v1", "v2"):
            raise UnsupportedProtocol(self._config.protocol)
        return self._config.protocol == "v1"

    async def _is_success(
        self, base_url: str, path: str, headers: Mapping[str, str] | None, timeout: float | None
    ) -> bool:
        try:
            await self._send("GET", base_url, path, ((), ()), headers, timeout)
        except InferenceError as error:
            if error.status_code is None:
                raise
            return False
        return True

    async def _send(
        self,
        method: str,
        base_url: str,
        path: str,
        content: tuple[tuple[bytes, ...], tuple[tuple[str, str], ...]],
        headers: Mapping[str, str] | None,
        timeout: float | None,
    ) -> RestResponse:
        """Return a response of status 2xx. Raises InferenceError with the status of any other."""
        verify = self._config.verify
        ca = verify if isinstance(verify, str) else os.environ.get("REQUESTS_CA_BUNDLE", "")
        where = address(base_url, "", None, None, ca, verify is not False)
        transport = self._transports.setdefault(where, connect_transport(where))
        body, own = content
        fields = {**{name.lower(): value for name, value in (headers or {}).items()}, **dict(own)}
        request = RestRequest(method, (where.base + path) or "/", tuple(fields.items()), body)
        deadline = Deadline.after(timeout if timeout is not None else self._config.timeout)
        response = await self._send_with_retries(transport, request, deadline)
        if not 200 <= response.status < 300:
            error = InferenceError(f"{_error_text(response)}, '{response.status}' for url '{where.name}{path}'")
            error.status_code = response.status
            raise error
        return response

    async def _send_with_retries(self, transport: Any, request: RestRequest, deadline: Deadline) -> RestResponse:
        """Send a request again if the server cannot be reached."""
        for attempts_left in range(self._config.retries, -1, -1):
            try:
                response: RestResponse = await transport.send(request, deadline)
                return response
            except ServerUnreachable as error:
                if not attempts_left:
                    raise InferenceError(error.message) from error
            except DragomanError as error:
                raise InferenceError(error.message) from error
            await asyncio.sleep(_RETRY_DELAY_S)
        raise AssertionError


def _body(data: Any) -> tuple[tuple[bytes, ...], tuple[tuple[str, str], ...]]:
    """Return the content of a request and its headers."""
    length = None
    if isinstance(data, InferRequest):
        data, length = data.to_rest()
    if length is not None:
        return (data,), (("content-type", "application/octet-stream"), (_LENGTH, str(length)))
    return (orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY),), (("content-type", "application/json"),)


def _error_text(response: RestResponse) -> str:
    """Return the error in the JSON body of a response, else the start of the body."""
    try:
        value = orjson.loads(response.body)
    except orjson.JSONDecodeError:
        return bytes(response.body[:200]).decode("utf-8", "replace")
    return str(value.get("error", value)) if isinstance(value, dict) else str(value)


class InferenceGRPCClient:
    """Client of the V2 protocol over gRPC; needs the package grpcio. Raises its RpcError."""

    def __init__(
        self,
        url: str,
        verbose: bool = False,
        use_ssl: bool = False,
        root_certificates: str | None = None,
        private_key: str | None = None,
        certificate_chain: str | None = None,
        creds: Any = None,
        channel_args: Iterable[tuple[str, Any]] | None = None,
        timeout: float | None = 60,
        retries: int | None = 3,
    ) -> None:
        import grpc.aio

        target = url if ":" in url else f"{url}:{443 if use_ssl else 80}"
        sizes = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        arguments = list(channel_args) if channel_args is not None else sizes
        arguments.append(("grpc.enable_retries", int(bool(retries))))
        if creds is None and use_ssl:
            files = (root_certificates, private_key, certificate_chain)
            creds = grpc.ssl_channel_credentials(*(None if path is None else _read(path) for path in files))
        if creds is None:
            self._channel = grpc.aio.insecure_channel(target, options=arguments)
        else:
            self._channel = grpc.aio.secure_channel(target, creds, options=arguments)
        self._timeout_s = timeout

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def infer(self, infer_request: InferRequest, timeout: float | None = None, headers: Any = None) -> Any:
        """Return the InferResponse."""
        response = await self._call("ModelInfer", infer_request.to_grpc(), ModelInferResponse, timeout, headers)
        return InferResponse.from_grpc(response)

    async def is_server_ready(self, timeout: float | None = None, headers: Any = None) -> bool:
        """Return whether the server is ready."""
        response = await self._call("ServerReady", ServerReadyRequest(), ServerReadyResponse, timeout, headers)
        return bool(response.ready)

    async def is_server_live(self, timeout: float | None = None, headers: Any = None) -> bool:
        """Return whether the server is live."""
        response = await self._call("ServerLive", ServerLiveRequest(), ServerLiveResponse, timeout, headers)
        return bool(response.live)

    async def is_model_ready(self, model_name: str, timeout: float | None = None, headers: Any = None) -> bool:
        """Return whether a model is ready."""
        request = ModelReadyRequest(name=model_name)
        return bool((await self._call("ModelReady", request, ModelReadyResponse, timeout, headers)).ready)

    async def _call(self, method: str, request: Any, answer: Any, timeout_s: float | None, headers: Any) -> Any:
        call = self._channel.unary_unary(
            _SERVICE + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        metadata = [(name.lower(), value) for name, value in headers or ()]
        return await call(request, timeout=self._timeout_s if timeout_s is None else timeout_s, metadata=metadata)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
