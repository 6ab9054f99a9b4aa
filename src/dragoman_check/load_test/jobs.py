"""Requests of a load test, derived from the model's signature or read from a file."""

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput
from dragoman.formats import fast_json
from dragoman_check.conformance import umbridge
from dragoman_check.conformance.clauses import ClauseFailed, NotOffered, NotTried
from dragoman_check.conformance.http import KEY_HINT
from dragoman_check.conformance.samples import SampleTensor, sample_of, samples_of_request
from dragoman_check.conformance.target import Target, declared_tensors

# Whether an event of a stream holds generated text, by the fields of its JSON.
HasText = Callable[[Any], bool]
PROTOCOLS = (
    "rest", "rest-binary", "grpc", "umbridge", "openai-chat", "openai-completions", "tgi", "lmi",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """Model and content of the requests."""

    model: str
    rows: int = 1
    prompt: str = "Write one sentence about the weather."
    max_tokens: int = 64
    file: str = ""


@dataclass(frozen=True, slots=True)
class RequestJob:
    """One request, to be sent many times.

    request: the bytes of an HTTP/1.1 request, or of a ModelInferRequest if `grpc` is set.
    has_text: set for streams.
    events_are_tokens: each event with text is one token.
    """

    protocol: str
    host: str
    port: int
    request: bytes
    tls: ssl.SSLContext | None = None
    grpc: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    ca: str = ""
    has_text: HasText | None = None
    events_are_tokens: bool = False


def make_job(target: Target, protocol: str, options: Options) -> RequestJob:
    """Return the job of a protocol. Raises InvalidInput if no valid request can be made."""
    try:
        return _MAKERS[protocol](target, protocol, options)
    except (ClauseFailed, NotOffered, NotTried) as error:
        if "is not ready: LOADING" in str(error):  # what Dragoman and servers like it say in every protocol
            raise InvalidInput(f"model '{options.model}' is loading; try again when it is ready") from error
        raise InvalidInput(f"no {protocol} request for '{options.model}' can be made: {error}") from error


def _rest(target: Target, protocol: str, options: Options) -> RequestJob:
    body = (
        _file(options)
        if options.file
        else fast_json.dumps({"inputs": [s.as_json() for s in _samples(target, options)]})
    )
    return _http(target, protocol, f"/v2/models/{quote(options.model, safe='')}/infer", body)


def _binary(target: Target, protocol: str, options: Options) -> RequestJob:
    samples = _samples(target, options)
    parts = [sample.as_bytes() for sample in samples]
    inputs = []
    for sample, part in zip(samples, parts, strict=True):
        entry = sample.as_json()
        del entry["data"]
        inputs.append(entry | {"parameters": {"binary_data_size": len(part)}})
    text = fast_json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    path = f"/v2/models/{quote(options.model, safe='')}/infer"
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(text))}
    return _http(target, protocol, path, text + b"".join(parts), headers)


def _grpc(target: Target, protocol: str, options: Options) -> RequestJob:
    try:
        from dragoman_check.conformance.grpc_client import infer_request
    except ModuleNotFoundError as error:
        raise InvalidInput("gRPC needs the package 'grpcio': pip install 'dragoman[grpc]'") from error
    message = infer_request(options.model, _samples(target, options)).SerializeToString()
    host, _, port = target.grpc.rpartition(":")
    metadata = tuple((name.lower(), value) for name, value in target.http.headers.items())
    return RequestJob(protocol, host, int(port), message, target.http.tls, target.grpc, metadata, target.http.ca)


def _umbridge(target: Target, protocol: str, options: Options) -> RequestJob:
    if options.file:
        return _http(target, protocol, "/Evaluate", _file(options))
    function = umbridge.PROTOCOL.prepare(replace(target, models=(options.model,)))
    if not function.point:
        raise InvalidInput(f"'{options.model}' cannot be evaluated at the points tried; give a request with --input")
    body = {"name": options.model, "input": function.point, "config": target.config}
    return _http(target, protocol, "/Evaluate", fast_json.dumps(body))


def _text(paths: Sequence[str], bodies: Callable[[Options], Sequence[Mapping[str, Any]]], has_text: HasText) -> Any:
    """Return a maker of streamed text generation requests: the first path and body that the server accepts."""

    def make(target: Target, protocol: str, options: Options) -> RequestJob:
        contents = [_file(options)] if options.file else [fast_json.dumps(body) for body in bodies(options)]
        reasons = []
        for path in (each.format(quote(options.model, safe="")) for each in paths):
            for content in contents:
                response = target.http.send("POST", path, content, {"Content-Type": "application/json"})
                if response.status == 200:
                    job = _http(target, protocol, path, content)
                    return replace(job, has_text=has_text, events_are_tokens=has_text is _has_token)
                if response.status not in (400, 422):
                    break
            reasons.append(
                f"POST {path} gets status {response.status} {response.body[:200].decode('utf-8', 'replace')}"
            )
        raise ClauseFailed("; ".join(reasons))

    return make


def _chat_bodies(options: Options) -> Sequence[Mapping[str, Any]]:
    return _openai_bodies(options, {"messages": [{"role": "user", "content": options.prompt}]})


def _completion_bodies(options: Options) -> Sequence[Mapping[str, Any]]:
    return _openai_bodies(options, {"prompt": options.prompt})


def _openai_bodies(options: Options, prompt: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return a request that asks for the number of tokens, and one for servers that do not know `stream_options`."""
    body = {"model": options.model, **prompt, "max_tokens": options.max_tokens, "stream": True}
    return [body | {"stream_options": {"include_usage": True}}, body]


def _generate_bodies(options: Options) -> Sequence[Mapping[str, Any]]:
    return [{"inputs": options.prompt, "parameters": {"max_new_tokens": options.max_tokens}, "stream": True}]


def _has_content(event: Any) -> bool:
    return any(c.get("text") or (c.get("delta") or {}).get("content") for c in event.get("choices") or ())


def _has_token(event: Any) -> bool:
    return isinstance(event.get("token"), dict)


_MAKERS: Mapping[str, Callable[[Target, str, Options], RequestJob]] = {
    "rest": _rest,
    "rest-binary": _binary,
    "grpc": _grpc,
    "umbridge": _umbridge,
    "openai-chat": _text(["/v1/chat/completions"], _chat_bodies, _has_content),
    "openai-completions": _text(["/v1/completions"], _completion_bodies, _has_content),
    "tgi": _text(["/models/{}/generate_stream", "/generate_stream"], _generate_bodies, _has_token),
    "lmi": _text(["/predictions/{}", "/invocations"], _generate_bodies, _has_token),
}


def _samples(target: Target, options: Options) -> list[SampleTensor]:
    """Return the inputs of a tensor request: those of the file, or derived from the metadata."""
    if options.file:
        try:
            return samples_of_request(parse_json(_file(options)))
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidInput(f"--input: expected a V2 inference request in JSON in '{options.file}'") from error
    response = target.http.get(f"/v2/models/{quote(options.model, safe='')}")
    if response.status == 404:
        raise InvalidInput(f"model '{options.model}' not found")
    if response.status != 200:
        said = response.body[:200].decode("utf-8", "replace")
        hint = {401: f"; {KEY_HINT}", 403: "; a request of your own, with --input FILE, needs no metadata"}.get(
            response.status, ""
        )
        raise ClauseFailed(f"GET /v2/models/{options.model} gets status {response.status} {said}{hint}")
    specs = declared_tensors(response.json(), "inputs")
    if not specs:
        raise InvalidInput(f"the metadata of '{options.model}' declares no inputs; give a request with --input FILE")
    return [sample_of(spec, options.rows) for spec in specs]


def _file(options: Options) -> bytes:
    try:
        return Path(options.file).read_bytes()
    except OSError as error:
        raise InvalidInput(f"--input: '{options.file}' cannot be read: {error.strerror}") from error


def _http(
    target: Target, protocol: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
) -> RequestJob:
    """Return a job whose request is serialized once."""
    address = urlsplit(target.http.url)
    host, port = address.hostname or "", address.port or (443 if target.http.tls else 80)
    fields = {"Host": address.netloc, "Content-Type": "application/json", **target.http.headers, **(headers or {})}
    lines = [f"POST {address.path}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())]
    request = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode("latin-1") + body
    return RequestJob(protocol, host, port, request, target.http.tls)
