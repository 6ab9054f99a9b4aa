"""Parse inference requests to LMI in any of its content types."""

import csv
import io
from collections.abc import Container, Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec
from msgspec import structs

from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import check_value, flag, format_value, text
from dragoman.core.text import Sampling
from dragoman.protocols.parameters import ParsedParameters, get_object, object_body, reject_unknown, reject_unused
from dragoman.protocols.wire import HttpRequest, Policy
from dragoman_text.apis.common.openai_format import PLACEHOLDERS
from dragoman_text.apis.lmi.model import LmiModel
from dragoman_text.apis.lmi.parameters import ADAPTERS, parse_generation_parameters
from dragoman_text.limits import LMI_INPUTS

_FIELDS = ("inputs", "parameters", "stream", "adapters", "model_name")
_ADAPTER = "x-amzn-sagemaker-adapter-identifier"
_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_TARGET = "x-amzn-sagemaker-target-model"
_FAILED = "Input Parsing failed. Ensure that the request payload is valid. "
# Names that clients send for any model.
ANY_MODEL = PLACEHOLDERS | {"lmi"}
_NO_OBJECT = (
    "Invalid request payload. Request payload should be a json object specifying the 'inputs' field. Received payload "
)
_MAX_FORM_BYTES = 16 << 20
_MAX_FORM_LINES = 1 << 16
_ENCODED, _MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"


class LmiRequest(msgspec.Struct, frozen=True):
    """A parsed request: inputs, parameters, schema (`rolling`) and formatter of its response."""

    inputs: tuple[str, ...]
    parameters: ParsedParameters
    sampling: Sampling
    rolling: bool
    formatter: str


def parse_request(http: HttpRequest, model: LmiModel, policy: Policy) -> LmiRequest | Mapping[str, Any]:
    """Parse a request; a body of OpenAI's form is returned as it is. Raises InvalidInput with LMI's message if the
    payload is invalid."""
    try:
        body = _body(http, policy)
        if model.reads is not None:
            body = model.reads(body)
        if not isinstance(body, dict):
            raise InvalidInput(_NO_OBJECT + format_value(body))
        if is_openai_request(body):
            return body
        inputs, listed = _inputs(body)
        values = _values(body, http)
    except InvalidInput as error:
        raise InvalidInput(_FAILED + error.message) from error
    unknown = [name for name in body if name not in _FIELDS]
    reject_unknown(unknown, _FIELDS, policy)
    unused = other_model(body, model.name, policy)
    parameters, sampling = parse_generation_parameters(
        values, policy, infer_do_sample=model.infer_do_sample, rolling=model.rolling, trtllm=model.trtllm
    )
    ignored = (*unknown, *unused, *parameters.ignored)
    parameters = ParsedParameters(
        parameters.fields, parameters.options, {**parameters.names, "prompt": "inputs"}, ignored
    )
    stream = bool(check_value("stream", body.get("stream") or False, flag()))
    rolling = model.rolling and not listed
    chunked = stream or (model.streams and not rolling)
    formatter = model.format(parameters.options.get("output_formatter", ""), chunked)
    return LmiRequest(inputs, parameters, sampling, rolling, formatter)


def other_model(body: Mapping[str, Any], model: str, policy: Policy) -> list[str]:
    """Return the field of a body that names a model other than that of path, query or header. Raises InvalidInput for
    it in strict mode."""
    name = check_value("model_name", body.get("model_name") or "", text())
    unused = [] if name == model or name in ANY_MODEL else ["model_name"]
    reject_unused(unused, policy)
    return unused


def is_openai_request(body: Container[str]) -> bool:
    """Return whether a body with these fields is an OpenAI chat or completion."""
    return "messages" in body or ("prompt" in body and "inputs" not in body)


def model_name(http: HttpRequest) -> str:
    """Return the model that the query, a header or a form names; "" for none."""
    target = http.headers.get(_TARGET, "").rpartition("/")[2].removesuffix(".tar.gz")
    return _property(http, "model_name") or target or _in_form(http)


def with_version(http: HttpRequest) -> HttpRequest:
    """Return the request with the version of its query or header among its path parameters."""
    version = _property(http, "model_version")
    if not version or "version" in http.params:
        return http
    return structs.replace(http, params={**http.params, "version": version})


def _property(http: HttpRequest, name: str) -> str:
    """Return a property of a request: in the query, in a header or in SageMaker's custom attributes."""
    query = parse_qs(http.query).get(name, [""])[0]
    return query or http.headers.get(name, "") or attributes(http).get(name, "")


def _in_form(http: HttpRequest) -> str:
    """Return the model that a form names; "" for none."""
    # Long texts are not parsed twice. No client percent-encodes these letters.
    if not is_form(http) or b"model" not in bytes(http.body):
        return ""
    try:
        return _fields(http).get("model_name", "")
    except InvalidInput:  # reported when the body is parsed
        return ""


def attributes(http: HttpRequest) -> dict[str, str]:
    """Parse SageMaker's custom attributes, `k=v;k=v`."""
    pairs = (part.partition("=") for part in http.headers.get(_ATTRIBUTES, "").split(";"))
    return {key.strip(): value.strip() for key, separator, value in pairs if separator}


# --- bodies ------------------------------------------------------------------------------------------------


def media_type(http: HttpRequest) -> str:
    """Return the media type of the body, "" if unknown."""
    return http.headers.get("content-type", "").partition(";")[0].strip().lower()


def _body(http: HttpRequest, policy: Policy) -> Any:
    read = _form if is_form(http) else _BY_TYPE.get(media_type(http))
    if read is None:
        return object_body(http.body, policy)
    if not len(http.body):
        raise InvalidInput("the request body is empty")
    return read(http)


def _text(body: Any) -> str:
    try:
        return bytes(body).decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the request body is not valid UTF-8: {error.reason}") from error


def _parse_plain_text(http: HttpRequest) -> Any:
    return {"inputs": _text(http.body)}


def _table(http: HttpRequest) -> Any:
    """Parse rows under a header line, one column of which is `inputs`."""
    if bytes(http.body).count(b"\n") > _MAX_FORM_LINES:
        raise InvalidInput(f"too many rows in text/csv: expected at most {_MAX_FORM_LINES}")
    try:
        rows = list(csv.DictReader(io.StringIO(_text(http.body))))
    except csv.Error as error:
        raise InvalidInput(f"the request body is not valid CSV: {error}") from error
    if not rows or "inputs" not in rows[0]:
        raise InvalidInput("expected text/csv with a first line of names, of which one is 'inputs', and rows below")
    return {"inputs": [row["inputs"] or "" for row in rows]}


def is_form(http: HttpRequest) -> bool:
    # curl's default content type is a form, also for JSON; no form begins with a brace.
    kind = media_type(http)
    return kind == _MULTIPART or (kind == _ENCODED and not bytes(http.body[:64]).lstrip().startswith(b"{"))


def _fields(http: HttpRequest) -> dict[str, str]:
    """Return the parts of a form by name."""
    body = bytes(http.body)
    if len(body) > _MAX_FORM_BYTES or body.count(b"\n") + body.count(b"&") > _MAX_FORM_LINES:
        raise InvalidInput(
            f"the form is too large: expected at most {_MAX_FORM_BYTES} bytes and {_MAX_FORM_LINES} lines or fields"
        )
    if media_type(http) == _ENCODED:
        return {name: values[0] for name, values in parse_qs(_text(body)).items()}
    head = f"content-type: {http.headers['content-type']}\r\n\r\n".encode("latin-1")
    from email import message_from_bytes  # with all of email's parsers, for which each start would wait
    from email.policy import HTTP as MIME

    message: Any = message_from_bytes(head + body, policy=MIME)
    fields: dict[str, str] = {}
    for i, part in enumerate(message.iter_parts()):
        name = part.get_param("name", f"part {i}", "content-disposition")
        fields[str(name)] = _text(part.get_payload(decode=True) or b"")
    return fields


def _form(http: HttpRequest) -> Any:
    """Parse a form: the text is the part `data`, or the first; another may name the model."""
    fields = {name: value for name, value in _fields(http).items() if name != "model_name"}
    if not fields:
        raise InvalidInput("expected a form with at least one part, the text")
    prompt = next((fields[name] for name in ("inputs", "data") if name in fields), next(iter(fields.values())))
    return {"inputs": prompt}


_BY_TYPE = {"text/plain": _parse_plain_text, "text/csv": _table}


# --- fields ------------------------------------------------------------------------------------------------


def _inputs(body: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    value = body.get("inputs")
    listed = isinstance(value, list)
    texts: list[Any] = value if isinstance(value, list) else [value]
    if "inputs" not in body:
        raise InvalidInput(_NO_OBJECT + format_value(body))
    for each in texts:
        if not isinstance(each, str):
            kind = type(each).__name__
            raise InvalidInput(
                "Invalid request payload. The 'inputs' field must be a string, or a list of strings. "
                f"Received type <class '{kind}'>"
            )
    if not texts or not all(texts):
        raise InvalidInput(
            "Invalid request payload. The 'inputs' field does not contain any content. "
            f"Received payload {format_value(body)}"
        )
    if len(texts) > LMI_INPUTS:
        raise InvalidInput(f"`inputs` must have at most {LMI_INPUTS} strings; got {len(texts)}")
    return tuple(texts), listed


def _values(body: Mapping[str, Any], http: HttpRequest) -> dict[str, Any]:
    """Return the parameters as sent, with the adapter that a field or a header names."""
    try:
        values = get_object(body, "parameters")
    except InvalidInput as error:
        raise InvalidInput(
            "Invalid request payload. 'parameters' must be provided as an object of key-value pairs. "
            f"Received payload {format_value(body)}"
        ) from error
    adapters = body.get("adapters") or http.headers.get(_ADAPTER) or attributes(http).get("adapters")
    return {**values, "adapters": list(check_value("adapters", adapters, ADAPTERS))} if adapters else values
