"""Embeddings at LMI's paths: one vector for a text, or one for each of several."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from dragoman.core.calls import Embed, Embedded, ModelDescription, Response
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.sampling import format_value
from dragoman.protocols.lmi.errors import LmiErrors
from dragoman.protocols.lmi.formats import to_json
from dragoman.protocols.lmi.request import media_type, other_model
from dragoman.protocols.text_common.parameters import build_request, ignored_header, json_body, reject_unknown
from dragoman.protocols.wire import JSON_TYPE, EndpointResult, EngineCall, HttpRequest, HttpResponse, Policy

_MOST_INPUTS = 2048
_KINDS = ("", "application/json", "application/x-www-form-urlencoded")  # curl calls JSON the last of these


def parse_embeddings_request(
    http: HttpRequest, model: ModelDescription, policy: Policy, errors: LmiErrors
) -> EndpointResult | None:
    """Parse an embeddings request; None if `inputs` is not text."""
    try:
        body = _body(http, policy)
        given = body.get("inputs") if body is not None else None
        texts: list[Any] = given if isinstance(given, list) else [given]
        if body is None or not texts or not all(isinstance(text, str) for text in texts):
            return None
        _check(body, texts, policy)
        unknown = _unknown(body) + other_model(body, model.name, policy)
    except InvalidInput as error:
        return _invalid_input(error)

    def reply(response: Response[Embedded]) -> HttpResponse:
        vectors = np.ascontiguousarray(response.answer.vectors.data, np.float32)
        value = orjson.dumps(vectors if isinstance(given, list) else vectors[0], option=orjson.OPT_SERIALIZE_NUMPY)
        return HttpResponse(200, (value,), (JSON_TYPE, *ignored_header(unknown)))

    def format_error(error: DragomanError) -> HttpResponse:
        return _invalid_input(error) if isinstance(error, InvalidInput) else errors.write(error)

    return EngineCall(build_request(Embed(tuple(texts)), http, policy, model.name), reply, format_error)


def _body(http: HttpRequest, policy: Policy) -> dict[str, Any] | None:
    if media_type(http) not in _KINDS:
        return None
    found = json_body(http.body, policy)
    return found if isinstance(found, dict) else None


def _check(body: Mapping[str, Any], texts: Sequence[str], policy: Policy) -> None:
    if not all(texts) or len(texts) > _MOST_INPUTS:
        raise InvalidInput(
            f"`inputs` must be a text, or at most {_MOST_INPUTS} texts, none empty; got {format_value(body['inputs'])}"
        )
    reject_unknown(_unknown(body), ("inputs",), policy)


def _unknown(body: Mapping[str, Any]) -> list[str]:
    return [name for name, value in body.items() if name not in ("inputs", "model_name") and value not in (None, {})]


def _invalid_input(error: DragomanError) -> HttpResponse:
    """Format an invalid input as DJL Serving does."""
    value = {"code": 400, "type": "TranslateException", "message": error.message}
    return HttpResponse(400, (to_json(value),), (JSON_TYPE,))
