"""Routes of the OpenAPI documents and of the page that shows them."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec

from dragoman.core.calls import Describe, ModelDescription, Request
from dragoman.protocols.openapi.document import document
from dragoman.protocols.openapi.model import model_document
from dragoman.protocols.openapi.page import page_routes
from dragoman.protocols.wire import (
    JSON_TYPE,
    EngineCall,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    Operation,
    Role,
    Route,
    json_response,
)

PATH = "/openapi.json"
# Paths of MLServer: its page, and the document of it.
_PAGE, _DOCUMENT = "/docs", "/docs/dataplane.json"
_MODELS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
_OPERATION = Operation("Describe this interface as an OpenAPI document", {200: {JSON_TYPE[1]: dict[str, Any]}})
_MODEL_OPERATION = Operation("Describe the interface of a model as an OpenAPI document", _OPERATION.responses)


def protocol(
    protocols: Sequence[HttpProtocol],
    *,
    version: str,
    root_path: str,
    is_guarded: Callable[[Role], bool],
    has_page: bool,
) -> HttpProtocol:
    """Return the routes of the documents that describe these protocols, and of the page that shows them if it is on.

    `is_guarded` returns whether routes for a role need a credential. The document of the server names no models.
    """

    @cache
    def server_document() -> dict[str, Any]:
        return document((*protocols, ours), version, root_path, is_guarded)

    @cache
    def text() -> bytes:
        return msgspec.json.encode(server_document())

    def server_endpoint(_: HttpRequest) -> HttpResponse:
        return HttpResponse(200, (text(),), (JSON_TYPE,))

    def model_endpoint(http: HttpRequest) -> EngineCall[ModelDescription, HttpResponse]:
        model_version = http.params.get("version", "")
        return EngineCall(
            Request(Describe(), http.params["model"], model_version),
            lambda r: json_response(model_document(server_document(), r.answer, model_version)),
        )

    routes = [
        Route("GET", PATH, server_endpoint, role="read", operation=_OPERATION),
        Route("GET", f"/v2{_DOCUMENT}", server_endpoint, role="read"),
    ]
    models = [model for model in _MODELS if any(route.pattern == model for p in protocols for route in p.routes)]
    for model in models:
        routes.append(Route("GET", f"{model}{PATH}", model_endpoint, role="read", operation=_MODEL_OPERATION))
        routes.append(Route("GET", f"{model}{_DOCUMENT}", model_endpoint, role="read"))
    if has_page:
        pages = [(_PAGE, PATH), (f"/v2{_PAGE}", f"/v2{_DOCUMENT}")]
        routes += page_routes([*pages, *((f"{model}{_PAGE}", f"{model}{_DOCUMENT}") for model in models)])
    errors, format_error = protocols[0].errors, protocols[0].format_error
    ours = HttpProtocol("openapi", tuple(routes), format_error, errors=errors)
    return ours
