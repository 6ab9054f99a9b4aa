"""Calls of the Open Inference Protocol over gRPC, recorded for the report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from dragoman.formats import grpc_messages as m
from dragoman_check.conformance.clauses import ClauseFailed, RecordedExchange
from dragoman_check.conformance.samples import SampleTensor
from dragoman_check.conformance.target import Target

_SHOWN = 600
_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


class CallRejected(Exception):
    """The server ended a call with a status other than OK."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code


@dataclass(slots=True)
class GrpcTarget:
    """A channel to a server."""

    channel: Any
    metadata: Sequence[tuple[str, str]] = ()
    timeout_s: float = 30.0
    exchanges: list[RecordedExchange] = field(default_factory=list)

    def call(self, method: str, kind: Any, request: Any) -> Any:
        """Return the response to a call. Raises CallRejected, or ClauseFailed if the message cannot be parsed."""
        send = self.channel.unary_unary(f"/{m.SERVICE}/{method}")
        try:
            answer = send(request.SerializeToString(), timeout=self.timeout_s, metadata=self.metadata)
        except grpc.RpcError as error:
            raise self._record_rejection(method, request, error) from error
        return self._parse_response(method, kind, request, answer)

    def stream(self, method: str, kind: Any, requests: Sequence[Any]) -> Iterator[Any]:
        """Yield the responses of a stream of requests."""
        send = self.channel.stream_stream(f"/{m.SERVICE}/{method}")
        messages = iter([request.SerializeToString() for request in requests])
        try:
            for answer in send(messages, timeout=self.timeout_s, metadata=self.metadata):
                yield self._parse_response(method, kind, requests[0], answer)
        except grpc.RpcError as error:
            raise self._record_rejection(method, requests[0], error) from error

    def _record_rejection(self, method: str, request: Any, error: grpc.RpcError) -> CallRejected:
        code, details = error.code().name, error.details() or ""
        self.exchanges.append(RecordedExchange(_describe_request(method, request), f"{code}: {details}"[:_SHOWN]))
        return CallRejected(code, details)

    def _parse_response(self, method: str, kind: Any, request: Any, answer: bytes) -> Any:
        try:
            message = m.parse_message(kind, answer)
        except Exception as error:
            self.exchanges.append(RecordedExchange(_describe_request(method, request), f"{len(answer)} bytes"))
            raise ClauseFailed(f"expected a {kind.DESCRIPTOR.name}, got {answer[:40]!r}") from error
        self.exchanges.append(RecordedExchange(_describe_request(method, request), _text(message)))
        return message


def open_channel(target: Target) -> Any:
    """Return a channel to the gRPC address of a target, with TLS if its HTTP URL has it."""
    options = [("grpc.max_receive_message_length", -1)]
    if not target.http.url.startswith("https://"):
        return grpc.insecure_channel(target.grpc, options=options)
    authority = Path(target.http.ca).read_bytes() if target.http.ca else None
    return grpc.secure_channel(target.grpc, grpc.ssl_channel_credentials(authority), options=options)


def _describe_request(method: str, request: Any) -> str:
    return f"{method} {_text(request)}".rstrip()


def _text(message: Any) -> str:
    text = " ".join(str(message).split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def infer_request(model: str, samples: Sequence[SampleTensor], raw: bool = True, **fields: Any) -> Any:
    """Return a ModelInferRequest with raw contents, or with typed ones."""
    request = m.ModelInferRequest(model_name=model, **fields)
    for sample in samples:
        one = request.inputs.add(name=sample.name, datatype=sample.datatype, shape=sample.shape)
        if raw:
            request.raw_input_contents.append(sample.as_bytes())
        else:
            values = [v.encode() if isinstance(v, str) else v for v in sample.values]
            getattr(one.contents, _CONTENTS[sample.datatype]).extend(values)
    return request


def contents_of(output: Any) -> Mapping[str, int]:
    """Return the numbers of elements of the typed contents that are set."""
    lengths = ((name, len(getattr(output.contents, name))) for name in dict.fromkeys(_CONTENTS.values()))
    return {name: count for name, count in lengths if count}


def contents_field(datatype: str) -> str | None:
    """Return the field of typed contents, None for datatypes that have none."""
    return _CONTENTS.get(datatype)
