"""Find the model that a TGI request means."""

from collections.abc import Callable, Mapping
from typing import Any

from dragoman.core.calls import DescribeModels, ModelDescription, Request, Response
from dragoman.protocols.text_common.openai_format import PLACEHOLDERS
from dragoman.protocols.wire import EndpointResult, HttpRequest, PreliminaryCall


def addressed(
    body: Mapping[str, Any], http: HttpRequest, then: Callable[[str, tuple[str, ...]], EndpointResult]
) -> EndpointResult:
    """Call `then` with the name of the model and the names of fields that have no effect.

    TGI ignores the field `model` of a body. Here it chooses the model if the path names none and such a model exists.
    """
    named, path = body.get("model"), http.params.get("model", "")
    named = named.rpartition("/")[2] if isinstance(named, str) else ""
    if not named or named == path:
        return then(path, ())
    passed_over = () if named in PLACEHOLDERS else ("model",)
    if path:
        return then(path, passed_over)

    def choose(response: Response[tuple[ModelDescription, ...]]) -> EndpointResult:
        known = any(found.name == named for found in response.answer)
        return then(named, ()) if known else then("", passed_over)

    return PreliminaryCall(Request(DescribeModels()), choose)
