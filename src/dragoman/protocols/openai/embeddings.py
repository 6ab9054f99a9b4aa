"""OpenAI's embeddings endpoint: one vector per text."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from dragoman.core.calls import Embed, Embedded, Response
from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import InvalidValueError, ValueKind, format_value, integer
from dragoman.protocols.text_common.openai_format import anything, resolve_model
from dragoman.protocols.text_common.parameters import Parameter, build_request, is_token_id, option, parse_parameters
from dragoman.protocols.wire import JSON_TYPE, EndpointResult, EngineCall, HttpRequest, HttpResponse, Policy

_MOST_INPUTS = 2048


def _format() -> ValueKind:
    def read(value: Any) -> str:
        if value not in ("float", "base64"):
            raise InvalidValueError
        return str(value)

    return ValueKind('"float" or "base64"', read)


_PARAMETERS: Mapping[str, Parameter] = {
    "input": option("input", anything()),
    "model": option("model", anything()),
    "user": option("user", anything()),
    "encoding_format": option("encoding_format", _format()),
    "dimensions": option("dimensions", integer(1)),
}


def parse_embedding_request(body: Mapping[str, Any], http: HttpRequest, policy: Policy) -> EndpointResult:
    """Parse an embeddings request."""
    return resolve_model(body, http, lambda name: _embedding(body, http, policy, name))


def _embedding(body: Mapping[str, Any], http: HttpRequest, policy: Policy, model: str) -> EndpointResult:
    found = parse_parameters(body, _PARAMETERS, policy)
    packed = found.options.get("encoding_format") == "base64"
    size = found.options.get("dimensions")
    call = Embed(_inputs(found.options.get("input")))

    def reply(response: Response[Embedded]) -> HttpResponse:
        vectors = np.ascontiguousarray(response.answer.vectors.data, np.float32)
        if size is not None:
            vectors = _shorten(vectors, size)
        value = [
            {"object": "embedding", "index": i, "embedding": _format_vector(v, packed)} for i, v in enumerate(vectors)
        ]
        usage = {"prompt_tokens": response.answer.tokens, "total_tokens": response.answer.tokens}
        whole = {"object": "list", "data": value, "model": response.model, "usage": usage}
        body = orjson.dumps(whole, option=orjson.OPT_SERIALIZE_NUMPY)
        return HttpResponse(200, (body,), (JSON_TYPE, *found.headers))

    return EngineCall(build_request(call, http, policy, model), reply)


def _inputs(given: Any) -> tuple[str | tuple[int, ...], ...]:
    match given:
        case str() if given:
            return (given,)
        case [*items] if items:
            if all(map(is_token_id, items)):
                return (tuple(items),)
            if len(items) <= _MOST_INPUTS and all(_is_input(item) for item in items):
                return tuple(item if isinstance(item, str) else tuple(item) for item in items)
    raise InvalidInput(
        f"`input` must be a text, or a list of at most {_MOST_INPUTS} texts or lists of token ids, none empty; "
        f"got {format_value(given)}"
    )


def _is_input(item: Any) -> bool:
    return isinstance(item, str | list) and bool(item) and (isinstance(item, str) or all(map(is_token_id, item)))


def _shorten(vectors: Any, size: int) -> Any:
    """Return the first `size` numbers of each vector, scaled to length 1. Raises InvalidInput if shorter."""
    if size > vectors.shape[1]:
        raise InvalidInput(f"`dimensions` must be <= {vectors.shape[1]}, what the model has; got {size}")
    cut = vectors[:, :size]
    return np.ascontiguousarray(cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12), np.float32)


def _format_vector(vector: Any, packed: bool) -> Any:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if packed else vector
